"""The speed of collectives and disks, through the code of training: axes, and files of the nvme tier."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from zeroshard.comm.collectives import Axis
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.streams import mark_here
from zeroshard.tiers.files import Swap
from zeroshard.tiers.memory import host_memory
from zeroshard.tiers.swapfile import check_folder, file_system

SIZES = (1 << 20, 16 << 20, 64 << 20)
"""Bytes of the whole buffer of a unit: a small one, and two of large layers."""
ROUNDS = 5


class Bandwidth(NamedTuple):
    """The speed of a collective over all ranks."""

    collective: str
    num_bytes: int
    """Bytes of the whole buffer, of which each rank has one part."""
    seconds: float
    """The median of the rounds, on the slowest rank."""

    def rate(self, num_ranks: int) -> float:
        """Return the bytes per second that each rank sends: (N - 1) / N of the buffer in `seconds`.

        nccl-tests calls it the bus bandwidth of all-gather and reduce-scatter. An agreement has none: 0.
        """
        return self.num_bytes * (num_ranks - 1) / num_ranks / self.seconds


def measure_bandwidth(world: Axis, sizes: Sequence[int] = SIZES) -> list[Bandwidth]:
    """Time all-gather and reduce-scatter of each size, and a small agreement; collective.

    Args:
        world: the axis of all ranks; with one rank the result is empty.
        sizes: bytes of the whole buffers.
    """
    if world.size == 1:
        return []
    found = []
    for num_bytes in sizes:
        each = num_bytes // 4 // world.size
        flat = torch.ones(each * world.size, device=world.device)
        own, pool = torch.ones(each, device=world.device), BufferPool(world.device)

        def gather(flat: torch.Tensor = flat, own: torch.Tensor = own) -> None:
            world.all_gather(flat, own, tag=0, label="all-gather of the doctor").wait()

        def reduce(flat: torch.Tensor = flat, own: torch.Tensor = own, pool: BufferPool = pool) -> None:
            world.reduce_scatter(flat, own, pool, tag=1, label="reduce-scatter of the doctor").wait()

        found.append(Bandwidth("all-gather", flat.nbytes, _time(world, gather)))
        found.append(Bandwidth("reduce-scatter", flat.nbytes, _time(world, reduce)))
    agree = _time(world, lambda: world.any([True], "agreement of the doctor")())
    return [*found, Bandwidth("agreement of a step", 0, agree)]


def _time(world: Axis, run: Callable[[], object]) -> float:
    """Return the median seconds of a collective on the slowest rank; the first round is not timed."""
    seconds = []
    for number in range(ROUNDS + 1):
        world.any([True], "begin of a round")()  # all ranks begin together
        begin = time.perf_counter()
        run()
        mark_here(world.device).synchronize()
        if number:
            seconds.append(time.perf_counter() - begin)
    everyone: list[float] = world.all_gather_object(median(seconds), "times of the ranks")
    return max(everyone)


PART, NUM_PARTS, DISK_ROUNDS = 32 << 20, 8, 3
"""Bytes of a part, parts of a round, and rounds: 256 MiB are written and read three times."""


class DiskSpeed(NamedTuple):
    """The speed of the disk of a folder, for the rank that measured it."""

    folder: str
    system: str
    """The type of the file system; "unknown" where the system does not tell."""
    free: int
    """Free bytes."""
    write: float
    """Bytes per second, the median of the rounds."""
    read: float
    note: str
    """A warning about this place; "" for none."""


def measure_disk(folder: Path, rank: int = 0) -> DiskSpeed:
    """Write and read a file in a folder as offloaded states are, and remove it.

    Reads and writes go past the page cache where the file system has direct I/O; `note` tells if it has none.

    Args:
        folder: an existing folder.
        rank: the rank, for the name of the file.

    Raises:
        ValueError: the folder is not there, may not be written to, or has no room.
        RuntimeError: the disk is full.
    """
    check_folder(folder)
    needed, free = PART * NUM_PARTS, shutil.disk_usage(folder).free
    if free < 2 * needed:
        raise ValueError(f"--disk: expected {2 * needed >> 20} MiB free in {folder}, got {free >> 20}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        swap = Swap([folder], rank)
    try:
        extents = [swap.allocate(PART) for _ in range(NUM_PARTS)]
        buffers = [host_memory(extent.padded, pinned=False).fill_(17) for extent in extents]

        def run(move: object) -> float:
            begin = time.perf_counter()
            transfers = [move(*pair) for pair in zip(extents, buffers, strict=True)]  # type: ignore[operator]
            for transfer in transfers:
                transfer.wait()
            return time.perf_counter() - begin

        seconds = [(run(swap.write), run(swap.read)) for _ in range(DISK_ROUNDS)]
    finally:
        swap.close()
    write, read = (needed / median(times) for times in zip(*seconds, strict=True))
    note = " ".join(str(warning.message).partition(": ")[2] for warning in caught)
    return DiskSpeed(str(folder), file_system(folder) or "unknown", free, write, read, note)
