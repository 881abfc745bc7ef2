"""A range of blocks, divided among as many threads as torch uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

_FEWEST = 64
"""Blocks that are worth a thread."""


def over_blocks(work: Callable[[int, int], None], num_blocks: int) -> None:
    """Call `work(first, last)` for parts of the range [0, num_blocks); this thread takes one of them.

    Returns when all parts are done. Raises the first error of any part.
    """
    num_threads = min(torch.get_num_threads(), num_blocks // _FEWEST)
    if num_threads <= 1:
        work(0, num_blocks)
        return
    cuts = [num_blocks * at // num_threads for at in range(num_threads + 1)]
    pool = _pool(os.getpid(), num_threads - 1)
    others = [pool.submit(work, *part) for part in pairwise(cuts[1:])]
    try:
        work(cuts[0], cuts[1])
    finally:
        errors = [other.exception() for other in others]  # none may still write when this returns
    if error := next(filter(None, errors), None):
        raise error


@cache
def _pool(process: int, num_threads: int) -> ThreadPoolExecutor:
    """One for each process: threads don't survive a fork."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="zeroshard-optimizer")
