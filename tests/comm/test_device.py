"""Which device a rank computes on: as a function of what surrounds it, without any accelerator."""

import os

import pytest
import torch

from zeroshard.comm.device import choose_device, use_device
from zeroshard.comm.mesh import start_process_group

NODE = {
    "environment": {"LOCAL_RANK": "3"},
    "accelerator": "cuda",
    "num_devices": 8,
    "current_index": 0,
    "rank": 11,
    "num_ranks": 16,
    "backends": None,
}
"""Rank 3 of the second node of 8 GPUs, under torchrun."""
CPU_ONLY = {"accelerator": None, "num_devices": 0}
GLOO, NCCL, BOTH = "cpu:gloo,cuda:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl"


def choice(asked, **changes):
    return str(choose_device(asked, **(NODE | changes)))


@pytest.mark.parametrize(
    ("asked", "changes", "chosen"),
    [
        (None, {}, "cuda:3"),
        ("cuda", {}, "cuda:3"),
        ("cuda:1", {}, "cuda:1"),
        ("cpu", {}, "cpu"),
        (None, CPU_ONLY, "cpu"),
        ("cpu", CPU_ONLY, "cpu"),
    ],
)
def test_the_device_is_the_one_asked_for_else_the_accelerator_of_the_local_rank_else_the_cpu(
    asked, changes, chosen
):
    assert choice(asked, **changes) == chosen


@pytest.mark.parametrize(
    ("asked", "backends", "chosen"),
    [
        (None, GLOO, "cpu"),  # who opens a Gloo group means the CPU
        (None, "cpu:gloo", "cpu"),
        (None, NCCL, "cuda:3"),
        (None, BOTH, "cuda:3"),
        ("cpu", BOTH, "cpu"),
        ("cuda:2", BOTH, "cuda:2"),
    ],
)
def test_an_open_process_group_decides_where_nothing_is_asked_for(asked, backends, chosen):
    assert choice(asked, backends=backends) == chosen


@pytest.mark.parametrize(("asked", "backends"), [("cuda", GLOO), ("cuda:1", "cpu:gloo"), ("cpu", NCCL)])
def test_a_device_that_the_open_process_group_does_not_serve_is_refused(asked, backends):
    with pytest.raises(ValueError, match=rf"device '{asked[:3]}.*the backends {backends}, and none of them"):
        choice(asked, backends=backends)


def test_a_local_rank_beyond_the_visible_devices_is_refused_with_the_numbers():
    environment = {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,5"}
    with pytest.raises(ValueError, match="config key 'device'") as caught:
        choice(None, num_devices=2, environment=environment)
    message = str(caught.value)
    for part in (
        "rank 11 sees",
        "an index below 2",
        "got cuda:3",
        "CUDA_VISIBLE_DEVICES",
        "--nproc-per-node",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("environment", "changes", "chosen"),
    [
        ({"SLURM_LOCALID": "5"}, {}, "cuda:5"),  # srun
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "6"}, {}, "cuda:6"),  # mpirun
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, {}, "cuda:1"),  # torchrun under srun
        ({}, {}, "cuda:3"),  # 11 modulo 8
        ({}, {"current_index": 6}, "cuda:6"),  # the script has set it
        ({}, {"current_index": 6, "rank": 0, "num_ranks": 1}, "cuda:6"),  # a process alone
        ({"SLURM_LOCALID": "0"}, {"current_index": 6, "num_ranks": 1}, "cuda:6"),  # in the shell of a job
        ({"LOCAL_RANK": "0"}, {"current_index": 6, "rank": 0, "num_ranks": 1}, "cuda:0"),
    ],
)
def test_without_torchrun_the_launcher_tells_the_local_rank_else_the_current_device_or_the_rank(
    environment, changes, chosen
):
    assert choice(None, environment=environment, **changes) == chosen


@pytest.mark.parametrize(
    ("asked", "changes", "words"),
    [
        ("cuda:8", {}, "an index below 8, the number of cuda devices that rank 11 sees, got cuda:8"),
        ("cuda", CPU_ONLY, "an accelerator that torch sees (there is none), got 'cuda'"),
        ("xpu", {}, "an accelerator that torch sees (cuda), got 'xpu'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(asked, changes, words):
    with pytest.raises(ValueError, match="config key 'device'") as caught:
        choice(asked, **changes)
    assert words in str(caught.value)


@pytest.mark.gpu
def test_this_process_uses_the_accelerator_of_its_local_rank_as_the_current_one(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert use_device(None) == torch.device(torch.accelerator.current_accelerator().type, 0)
    assert torch.accelerator.current_device_index() == 0


def start_on(kinds):
    """The error of a rank that brings a device of its own kind."""
    kind = kinds[int(os.environ["RANK"])]
    try:
        start_process_group(torch.device(kind, None if kind == "cpu" else 0), 20.0)
    except ValueError as error:
        return str(error)
    return None


def test_ranks_with_devices_of_different_types_are_told_before_they_wait_for_each_other(ranks):
    kinds = ["cpu", "cuda", "cpu"]
    expected = "expected devices of one type on all ranks, got cpu on rank 0, cuda on rank 1"
    assert ranks(3, start_on, kinds, process_group=False) == [expected] * 3
    assert ranks(2, start_on, ["cpu", "cpu"], process_group=False) == [None, None]
