"""The speed of a disk, measured through the files of the nvme tier."""

from __future__ import annotations

import shutil
import time
import warnings
from pathlib import Path
from statistics import median
from typing import NamedTuple

from zeroshard.tiers.files import Swap
from zeroshard.tiers.memory import host_memory
from zeroshard.tiers.swapfile import check_folder, file_system

PART, NUM_PARTS, ROUNDS = 32 << 20, 8, 3
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

        seconds = [(run(swap.write), run(swap.read)) for _ in range(ROUNDS)]
    finally:
        swap.close()
    write, read = (needed / median(times) for times in zip(*seconds, strict=True))
    note = " ".join(str(warning.message).partition(": ")[2] for warning in caught)
    return DiskSpeed(str(folder), file_system(folder) or "unknown", free, write, read, note)
