"""Ranges of blocks, divided among as many threads as torch uses.

To begin work in another thread costs as much as a step of some thousand elements, and other threads that run
Python slow it down. So the ranges of several parameters are divided together, and each thread begins once:

    ranges     |---- w1 ----|- w2 -|---------- w3 ----------|
    threads    |----- 0 -----|----- 1 -----|----- 2 -----|
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

_FEWEST = 64
"""Blocks that are worth a thread."""
_MOST = 1 << 16
"""Blocks, of 256 elements, from which a batch does not wait for more: gradients may be widened until then."""

Work = Callable[[int, int], None]
"""Does the blocks from the first to before the last one."""


class BlockBatch:
    """Works that are done together, in any order, and then calls that follow them."""

    def __init__(self) -> None:
        self._ranges: list[tuple[Work, int]] = []
        self._num_blocks = 0
        self._ends: list[Callable[[], None]] = []

    def add(self, work: Work, num_blocks: int) -> None:
        """Add a range of blocks, [0, num_blocks)."""
        self._ranges.append((work, num_blocks))
        self._num_blocks += num_blocks

    def then(self, end: Callable[[], None]) -> None:
        """Add a call that follows all works so far; it is left out if one of them fails."""
        self._ends.append(end)

    def run_if_large(self) -> None:
        """Do what was added, if it is much."""
        if self._num_blocks >= _MOST:
            self.run()

    def run(self) -> None:
        """Do what was added; return when all is done, and raise the first error of any part."""
        (ranges, self._ranges), (ends, self._ends) = (self._ranges, []), (self._ends, [])
        total, self._num_blocks = self._num_blocks, 0
        num_threads = max(1, min(torch.get_num_threads(), total // _FEWEST))
        own, *others = pairwise(total * at // num_threads for at in range(num_threads + 1))
        begun = [_pool(os.getpid(), num_threads - 1).submit(_do, ranges, *part) for part in others]
        try:
            _do(ranges, *own)
        finally:
            errors = [other.exception() for other in begun]  # none may still write when this returns
        if error := next(filter(None, errors), None):
            raise error
        for end in ends:
            end()


def _do(ranges: Sequence[tuple[Work, int]], first: int, last: int) -> None:
    """Do the blocks from first to before last, counted through all ranges."""
    for work, num_blocks in ranges:
        if max(first, 0) < min(last, num_blocks):
            work(max(first, 0), min(last, num_blocks))
        first, last = first - num_blocks, last - num_blocks


@cache
def _pool(process: int, num_threads: int) -> ThreadPoolExecutor:
    """One for each process: threads don't survive a fork."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="zeroshard-optimizer")
