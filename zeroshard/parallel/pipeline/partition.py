"""The division of a model's blocks into chunks: contiguous, each with at least one block, best by a measure.

    blocks    4 1 1 1 1      time of each
    chunks    4 | 1 1 1 1    2 chunks: the variance and the maximum are least

The measures are the variance of the chunks' compute time, the variance of their parameter bytes, and the
largest compute time, which limits the speed of a full pipeline. As the total is the same for every division,
the least variance is the least sum of squares, and a sum over chunks can be minimized from the last chunk on
(dynamic programming): for n blocks and k chunks in O(n^2 k). Numbers are integers inside, so the result is
exact.

Several divisions may have the same measure. Of those with the same largest time, the ones with the least
variance of time are taken. Of those that are left, the one with the fewest blocks in the first chunk, then in
the second, and so on, because in 1F1B the first ranks hold the most activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from operator import add
from typing import Literal

Balance = Literal["time", "memory", "bottleneck"]

_Cost = Callable[[int, int], int | None]
"""The cost of a chunk, given its first and its next blocks; None: the chunk is not allowed."""


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """The measured profile of a block of the model."""

    time: float
    """Compute time of one micro-batch, forward and backward, in any unit."""
    parameter_bytes: int = 0
    """Bytes of the parameters, with all that is held for them."""


def partition(
    blocks: Sequence[BlockProfile], num_chunks: int, balance: Balance = "time"
) -> tuple[range, ...]:
    """Return the blocks of each chunk.

    Args:
        blocks: the profile of each block, in the order of the model.
        num_chunks: chunks to make.
        balance: "time": least variance of compute time. "memory": least variance of parameter bytes.
            "bottleneck": least maximum of compute time.

    Raises:
        ValueError: there are fewer blocks than chunks.
    """
    if not 1 <= num_chunks <= len(blocks):
        raise ValueError(
            f"pipeline.schedule: expected 1 to {len(blocks)} chunks, as each has a block or more, got "
            f"{num_chunks}"
        )
    numbers = [block.parameter_bytes if balance == "memory" else block.time for block in blocks]
    weight = _sums(numbers)
    most = weight(0, len(blocks))
    if balance == "bottleneck":
        ends = _best_ends(len(blocks), num_chunks, weight, max)
        most = max(map(weight, [0, *ends[:-1]], ends))

    def squared(first: int, end: int) -> int | None:
        own = weight(first, end)
        return own**2 if own <= most else None

    ends = _best_ends(len(blocks), num_chunks, squared, add)
    return tuple(map(range, [0, *ends[:-1]], ends))


def _best_ends(num_blocks: int, num_chunks: int, cost: _Cost, join: Callable[[int, int], int]) -> list[int]:
    """Return the ends of the chunks whose costs have the least sum (`add`) or maximum (`max`).

    Of several such divisions it is the first one in the order of the tie rule.
    """
    # best[first] is the least total for the blocks from `first` on in the chunks that are left.
    best: list[int | None] = [None] * num_blocks + [0]
    choices: list[list[int]] = []
    for chunk in reversed(range(num_chunks)):
        found: list[int | None] = [None] * (num_blocks + 1)
        choice = [num_blocks] * (num_blocks + 1)
        for first in range(chunk, num_blocks):
            for end in range(first + 1, num_blocks + 1):
                rest, own = best[end], None if best[end] is None else cost(first, end)
                if rest is None or own is None:
                    continue
                least, total = found[first], join(own, rest)
                if least is None or total < least:
                    found[first], choice[first] = total, end
        best = found
        choices.append(choice)
    ends = [0]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return ends[1:]


def _sums(numbers: Sequence[float]) -> Callable[[int, int], int]:
    """Return the function that gives the sum of a range of numbers, as integers in the same proportions."""
    exact = [Fraction(number) for number in numbers]
    scale = lcm(*(number.denominator for number in exact))
    before = list(accumulate((int(number * scale) for number in exact), initial=0))
    return lambda first, end: before[end] - before[first]
