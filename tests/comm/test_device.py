"""Which device a rank computes on: as a function of what surrounds it, without any accelerator."""

import os
import types

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from zeroshard.comm.device import use_device
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
CPU = torch.device("cpu")
CPU_ONLY = {"accelerator": None, "num_devices": 0}
GLOO, NCCL, BOTH = "cpu:gloo,cuda:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl"


@pytest.fixture
def choice(monkeypatch):
    """A function: what was asked for, what surrounds the process in the place of `NODE` -> its device."""

    def choose(asked, **changes):
        around = types.SimpleNamespace(**(NODE | changes))
        ranks = {"RANK": str(around.rank), "WORLD_SIZE": str(around.num_ranks)}
        monkeypatch.setattr(os, "environ", around.environment | ranks)
        device = torch.device(around.accelerator) if around.accelerator is not None else None
        fakes = {
            torch.accelerator: {
                "current_accelerator": lambda check_available: device,
                "device_count": lambda: around.num_devices,
                "current_device_index": lambda: around.current_index,
                "set_device_index": lambda index: None,
            },
            dist: {
                "is_initialized": lambda: around.backends is not None,
                "get_backend_config": lambda: around.backends,
                "get_rank": lambda: around.rank,
                "get_world_size": lambda: around.num_ranks,
            },
        }
        for module, functions in fakes.items():
            for name, function in functions.items():
                monkeypatch.setattr(module, name, function)
        return str(use_device(asked))

    return choose


def env(**environment):
    return {"environment": environment}


LAST = {"current_index": 6, "rank": 0, "num_ranks": 1}
"""A process alone, whose script has set the current device."""


@pytest.mark.parametrize(
    ("asked", "changes", "chosen"),
    [
        (None, {}, "cuda:3"),
        ("cuda", {}, "cuda:3"),
        ("cuda:1", {}, "cuda:1"),
        ("cpu", {}, "cpu"),
        (None, CPU_ONLY, "cpu"),
        (None, {"backends": GLOO}, "cpu"),  # who opens a Gloo group means the CPU
        (None, {"backends": NCCL}, "cuda:3"),
        (None, {"backends": BOTH}, "cuda:3"),
        ("cpu", {"backends": BOTH}, "cpu"),
        ("cuda:2", {"backends": BOTH}, "cuda:2"),
        (None, env(SLURM_LOCALID="5"), "cuda:5"),  # srun
        (None, env(OMPI_COMM_WORLD_LOCAL_RANK="6"), "cuda:6"),  # mpirun
        (None, env(LOCAL_RANK="1", SLURM_LOCALID="0"), "cuda:1"),  # torchrun under srun
        (None, env(), "cuda:3"),  # 11 modulo 8
        (None, env() | {"current_index": 6}, "cuda:6"),  # the script has set it
        (None, env() | LAST, "cuda:6"),
        (None, env(SLURM_LOCALID="0") | LAST | {"rank": 11}, "cuda:6"),  # in the shell of a job
        (None, env(LOCAL_RANK="0") | LAST, "cuda:0"),
    ],
)
def test_the_device_is_the_one_asked_for_or_the_accelerator_of_the_local_rank_or_the_cpu(
    choice, asked, changes, chosen
):
    assert choice(asked, **changes) == chosen


@pytest.mark.parametrize(
    ("asked", "changes", "words"),
    [
        ("cuda", CPU_ONLY, ["an accelerator that torch sees (there is none), got 'cuda'"]),
        ("xpu", {}, ["an accelerator that torch sees (cuda), got 'xpu'"]),
        ("cuda", {"backends": GLOO}, ["device 'cuda", f"the backends {GLOO}, and none of them"]),
        ("cpu", {"backends": NCCL}, ["device 'cpu", f"the backends {NCCL}, and none of them"]),
    ],
)
def test_a_device_that_is_not_there_or_that_the_open_group_does_not_serve_is_refused(
    choice, asked, changes, words
):
    with pytest.raises(ValueError, match=r"device") as caught:
        choice(asked, **changes)
    assert all(part in str(caught.value) for part in words)


@pytest.mark.gpu
def test_this_process_uses_the_accelerator_of_its_local_rank_as_the_current_one(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert use_device(None) == torch.device(torch.accelerator.current_accelerator().type, 0)
    assert torch.accelerator.current_device_index() == 0


@on_ranks(3, process_group=False)
def test_ranks_with_devices_of_different_types_are_told_before_they_wait_for_each_other():
    device = torch.device("cuda", 0) if os.environ["RANK"] == "1" else CPU
    expected = "expected devices of one type on all ranks, got cpu on rank 0, cuda on rank 1"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        start_process_group(device, 20.0)
