"""Start a benchmark's own ranks, and the process group inside them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

RESULT = "BENCHMARK_RESULT"
"""The environment variable that tells ranks the file for their result."""


def inside_rank() -> bool:
    """True if `torchrun` has started this process (for us or for the user)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(script: str, arguments: Sequence[str], num_ranks: int) -> int:
    """Run `script` on `num_ranks` local ranks, on a free port; return the exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", script, *arguments]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


def result_of_ranks(script: str, arguments: Sequence[str], num_ranks: int) -> Any:
    """Run `script` on `num_ranks` local ranks; return what they give to `give_result`.

    Raises:
        RuntimeError: a rank has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        os.environ[RESULT] = str(path)
        status = run_ranks(script, arguments, num_ranks)
        if status or not path.exists():
            raise RuntimeError(f"expected a result of {script} {' '.join(arguments)}, got status {status}")
        return json.loads(path.read_text())


def give_result(value: Any) -> None:
    """Give the value of rank 0 to the process that has started the ranks."""
    if dist.get_rank() == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(value))


def rank_device(device_type: str) -> torch.device:
    """This rank's device: "cpu", or "cuda" with its index."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, int(os.environ["LOCAL_RANK"]))


@contextmanager
def process_group(device_type: str, threads: int = 1) -> Iterator[torch.device]:
    """Open the default process group, yield this rank's device, and close it.

    Args:
        device_type: "cpu" (Gloo) or "cuda" (NCCL, with Gloo for CPU tensors).
        threads: the threads of a rank's own arithmetic on the CPU.
    """
    torch.set_num_threads(threads)
    device = rank_device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def timed(action: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, from a moment when all are there."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


@contextmanager
def common_folder(parent: Path | None) -> Iterator[Path]:
    """A folder that all ranks write to, removed at the end."""
    names = [tempfile.mkdtemp(dir=parent) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        shutil.rmtree(names[0], ignore_errors=True)


def end_rank() -> NoReturn:
    """End a rank whose work is done and written, without running destructors.

    Some engines keep references to process groups, and about one interpreter in five that ends with
    one aborts in Gloo ("terminate called without an active exception"); `torchrun` would call that a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
