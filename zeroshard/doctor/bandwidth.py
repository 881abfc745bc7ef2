"""The bandwidth of the collectives between ranks, through the code that training uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from zeroshard.comm.collectives import Axis
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.streams import mark_here

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
