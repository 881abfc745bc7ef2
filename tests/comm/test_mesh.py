"""Who this rank is: process groups, axes of the mesh, and worlds that do not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

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
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world():
    return open_world(CPU, Counter(), 20)


def describe_mesh(config):
    mesh = build_mesh(config, CPU)
    axis = open_axes(mesh, world()).dp_shard
    return mesh.mesh_dim_names, mesh.mesh.tolist(), (axis.rank, axis.size)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_ranks_lie_on_the_axis_over_which_states_are_sharded(ranks, num_ranks):
    everyone = list(range(num_ranks))
    assert ranks(num_ranks, describe_mesh, Config()) == [
        (("dp_shard",), everyone, (rank, num_ranks)) for rank in everyone
    ]


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


def refusal_of_mesh(pp, tp):
    try:
        build_mesh(Config(mesh=Mesh(pp=pp, tp=tp)), CPU)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("num_ranks", "pp", "tp"), [(3, 2, 1), (3, 1, 2), (2, 3, 1), (2, 2, 2), (1, 1, 2)])
def test_a_world_that_does_not_fit_the_mesh_is_refused_with_the_numbers(ranks, num_ranks, pp, tp):
    for message in ranks(num_ranks, refusal_of_mesh, pp, tp):
        assert f"{num_ranks} rank(s) cannot" in message
        assert f"multiple of {pp * tp}" in message
        assert (f"mesh.pp={pp}" in message, f"mesh.tp={tp}" in message) == (pp > 1, tp > 1)


def open_axes_without_a_shard_axis():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("somewhere", "else"))
    try:
        open_axes(mesh, world())
    except ValueError as error:
        return str(error)
    return None


def test_a_mesh_of_two_axes_without_the_shard_axis_is_refused_with_its_names(ranks):
    for message in ranks(2, open_axes_without_a_shard_axis):
        assert "'dp_shard'" in message
        assert "somewhere" in message


def exchange_in_subgroups():
    """Two shard groups of two ranks: what each collective gives within this rank's group."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", DP_SHARD))
    axis = open_axes(mesh, world()).dp_shard
    flat = torch.zeros(4)
    own = flat.chunk(2)[axis.rank].fill_(rank)
    axis.all_gather(flat, own, tag=0, label="test").wait()
    word = torch.tensor(float(rank))
    axis.broadcast(word, "test")
    flags = axis.any([rank == 3, rank == 0], "test")()
    total = axis.sum(torch.tensor(10.0**rank), "test")
    return (axis.rank, axis.size), flat.tolist(), word.item(), flags, total.item()


def test_the_groups_of_a_mesh_with_two_axes_exchange_among_themselves(ranks):
    assert ranks(4, exchange_in_subgroups) == [
        ((0, 2), [0, 0, 1, 1], 0, [False, True], 11),
        ((1, 2), [0, 0, 1, 1], 0, [False, True], 11),
        ((0, 2), [2, 2, 3, 3], 2, [True, False], 1100),
        ((1, 2), [2, 2, 3, 3], 2, [True, False], 1100),
    ]


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


def join_group():
    return start_process_group(CPU, 20), dist.get_world_size()


def test_a_process_group_that_is_there_is_joined(ranks):
    assert ranks(2, join_group) == [(False, 2), (False, 2)]


ALONE = """
import json, torch, torch.distributed as dist
from zeroshard.comm.counter import Counter
from zeroshard.comm.mesh import build_mesh, open_axes, open_world, start_process_group, stop_process_group
from zeroshard.config.sections import Config
cpu = torch.device("cpu")
started = start_process_group(cpu, 20.0)
axis = open_axes(build_mesh(Config(), cpu), open_world(cpu, Counter(), 20.0)).dp_shard
values = axis.any([True, False], "test")(), axis.sum(torch.ones(2), "test").tolist()
facts = started, dist.get_rank(), dist.get_world_size(), axis.rank, axis.size, values
axis.close(1.0)
stop_process_group()
print(json.dumps([*facts, dist.is_initialized()]))
"""


def test_without_torchruns_environment_a_process_is_a_group_of_its_own():
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, 0, 1, 0, 1, [[True, False], [1, 1]], False]
