"""Start a benchmark's own ranks, and the process group inside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist


def inside_rank() -> bool:
    """True if `torchrun` has started this process (for us or for the user)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(script: str, arguments: Sequence[str], num_ranks: int) -> int:
    """Run `script` on `num_ranks` local ranks, on a free port; return the exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", script, *arguments]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


@contextmanager
def process_group(device_type: str, threads: int = 1) -> Iterator[torch.device]:
    """Open the default process group, yield this rank's device, and close it.

    Args:
        device_type: "cpu" (Gloo) or "cuda" (NCCL, with Gloo for CPU tensors).
        threads: the threads of a rank's own arithmetic on the CPU.
    """
    torch.set_num_threads(threads)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def end_rank() -> NoReturn:
    """End a rank whose work is done and written, without running destructors.

    Some engines keep references to process groups, and about one interpreter in five that ends with
    one aborts in Gloo ("terminate called without an active exception"); `torchrun` would call that a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
