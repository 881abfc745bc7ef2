"""Who this rank is: process groups, axes of the mesh, and worlds that do not fit."""

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm.counter import Counter
from zeroshard.comm.mesh import (
    build_mesh,
    group_timeout,
    open_axes,
    open_world,
    start_process_group,
    stop_process_group,
)
from zeroshard.config.sections import Config, Mesh
from zeroshard.plan.placement import DP_SHARD

CPU = torch.device("cpu")


def world():
    return open_world(CPU, Counter(), 20)


def describe_hybrid_mesh(group_size):
    mesh = build_mesh(Config(shard_group_size=group_size), CPU)
    groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp_replicate", "dp_shard")]
    return mesh.mesh_dim_names, mesh.mesh.tolist(), groups


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_shard_groups_are_consecutive_ranks_and_replicas_have_the_same_place_in_theirs(ranks, group_size):
    rows = [list(range(first, first + group_size)) for first in range(0, 4, group_size)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    assert ranks(4, describe_hybrid_mesh, group_size) == [
        (("dp_replicate", "dp_shard"), rows, [columns[rank % group_size], rows[rank // group_size]])
        for rank in range(4)
    ]


def axes_of(config):
    """The ranks of each axis, sums over them, and the tags that the engine has."""
    mesh = build_mesh(config, CPU)
    axes = open_axes(mesh, world())
    own = torch.tensor([float(dist.get_rank())])
    sums = [axis.sum(own, "test").item() for axis in (axes.dp, axes.dp_shard, axes.dp_replicate, axes.tp)]
    groups = [axes.dp.global_ranks, axes.dp_shard.global_ranks]
    groups += [axis.global_ranks for axis in (axes.dp_replicate, axes.tp) if axis.size > 1]
    return mesh.mesh_dim_names, groups, sums, axes.dp.first_tag


def test_a_part_of_the_model_has_its_own_data_parallel_ranks(ranks):
    found = ranks(4, axes_of, Config(mesh=Mesh(tp=2)))
    for rank, (names, groups, sums, tag) in enumerate(found):
        data, tensor = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert names == ("dp_shard", "tp")
        assert groups == [data, data, tensor]
        assert sums == [sum(data), sum(data), rank, sum(tensor)]
        assert tag == found[0][-1]


def open_several_axes():
    """In a group of all, then rank 0 in one of its own, then in a group of all again."""
    config = Config()
    first = open_axes(build_mesh(config, CPU), world()).dp_shard.first_tag
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    if dist.get_rank() == 0:
        mesh = dist.device_mesh.DeviceMesh.from_group(alone, "cpu", mesh_dim_names=(DP_SHARD,))
        open_axes(mesh, world())
    second = open_axes(build_mesh(config, CPU), world()).dp_shard.first_tag
    return first, second


def test_engines_on_the_same_ranks_have_tags_of_their_own_that_all_ranks_agree_on(ranks):
    (first, second), others = ranks(2, open_several_axes)
    assert others == (first, second)
    assert abs(second - first) >= 1 << 16
    assert max(first, second) < 1 << 31


def start_twice():
    before = dist.is_initialized()
    started = start_process_group(CPU, 20), start_process_group(CPU, 20)
    group = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    stop_process_group()
    stop_process_group()
    return before, started, group, dist.is_initialized()


def test_a_process_group_is_started_from_torchruns_environment_once(ranks):
    results = ranks(2, start_twice, process_group=False)
    assert results == [(False, (True, False), (rank, 2, "gloo"), False) for rank in range(2)]


def test_a_backend_that_ends_the_process_by_itself_waits_longer_than_the_watchdog():
    assert group_timeout("gloo", 600.0).total_seconds() == 600.0
    assert group_timeout("nccl", 600.0).total_seconds() >= 600.0 + 10.0
