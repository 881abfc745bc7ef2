"""Who this rank is, and how ranks find each other: process groups, axes of the mesh, the store."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, Ranks, on_ranks
from zeroshard.comm.mesh import (
    build_mesh,
    group_timeout,
    open_axes,
    open_store,
    open_world,
    start_process_group,
    stop_process_group,
)
from zeroshard.plan.arrangement import Arrangement
from zeroshard.plan.placement import DP_SHARD

CPU = torch.device("cpu")


def world():
    return open_world(CPU, 20)


def test_a_backend_that_ends_the_process_by_itself_waits_longer_than_the_watchdog():
    assert group_timeout("gloo", 600.0).total_seconds() == 600.0
    assert group_timeout("nccl", 600.0).total_seconds() >= 600.0 + 10.0


@on_ranks(4)
def test_shard_groups_are_consecutive_ranks_and_replicas_have_the_same_place_in_theirs():
    rank = dist.get_rank()
    for group_size in (1, 2, 4):
        rows = [list(range(first, first + group_size)) for first in range(0, 4, group_size)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        mesh = build_mesh(Arrangement(4, shard_group_size=group_size), CPU, 20)
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
        assert mesh.mesh.tolist() == rows
        groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names]
        assert groups == [columns[rank % group_size], rows[rank // group_size]]


@on_ranks(4)
def test_a_part_of_the_model_has_its_own_data_parallel_ranks():
    mesh = build_mesh(Arrangement(4, tp=2), CPU, 20)
    axes, rank = open_axes(mesh, world()), dist.get_rank()
    data, tensor = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    assert mesh.mesh_dim_names == ("dp_shard", "tp")
    groups = [list(axis.global_ranks) for axis in (axes.dp, axes.dp_shard, axes.tp)]
    assert groups == [data, data, tensor]
    own = torch.tensor([float(rank)])
    sums = [axis.sum(own, "test")().item() for axis in (axes.dp, axes.dp_shard, axes.dp_replicate, axes.tp)]
    assert sums == [sum(data), sum(data), rank, sum(tensor)]
    assert len(set(world().all_gather_object(axes.dp.first_tag, "test"))) == 1


@on_ranks(2)
def test_engines_on_the_same_ranks_have_tags_of_their_own_that_all_ranks_agree_on():
    """In a group of all, then rank 0 in one of its own, then in a group of all again."""
    first = open_axes(build_mesh(Arrangement(2), CPU, 20), world()).dp_shard.first_tag
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    if dist.get_rank() == 0:
        mesh = dist.device_mesh.DeviceMesh.from_group(alone, "cpu", mesh_dim_names=(DP_SHARD,))
        open_axes(mesh, world())
    second = open_axes(build_mesh(Arrangement(2), CPU, 20), world()).dp_shard.first_tag
    assert set(world().all_gather_object((first, second), "test")) == {(first, second)}
    assert abs(second - first) >= 1 << 16
    assert max(first, second) < 1 << 31


@on_ranks(2, process_group=False)
def test_a_process_group_is_started_from_torchruns_environment_once():
    assert not dist.is_initialized()
    assert (start_process_group(CPU, 20), start_process_group(CPU, 20)) == (True, False)
    assert (str(dist.get_rank()), dist.get_world_size()) == (os.environ["RANK"], 2)
    assert dist.get_backend() == "gloo"
    stop_process_group()
    stop_process_group()
    assert not dist.is_initialized()


STARTS = 3


def start_again_and_again() -> list[tuple[bool, str]]:
    """Whether each start sees an address of the one before, and what it gets from rank 0."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen = []
    for number in range(STARTS):
        if rank == 2:
            time.sleep(0.2)  # so that the others read what was written at the start before
        store = open_store(rank, size, timedelta(seconds=20))
        is_stale = store.check([f"address {rank}"])
        store.set(f"address {rank}", f"{number}")
        seen.append((is_stale, store.get("address 0").decode()))
        for other in range(size):
            store.get(f"address {other}")
    return seen


def test_a_start_does_not_see_what_the_one_before_left_in_the_store(ranks: Ranks) -> None:
    expected = [(False, str(number)) for number in range(STARTS)]
    assert ranks(3, start_again_and_again, process_group=False) == [expected] * 3


def come_unless_last() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank + 1 < size:
        open_store(rank, size, timedelta(seconds=0.3))


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, come_unless_last, process_group=False)
    assert caught.value.errors[1] is None
    assert caught.value.errors[0] is not None
