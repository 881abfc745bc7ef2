"""The division of a model's blocks into chunks: contiguous, each with at least one block, best by a measure.

    blocks    4 1 1 1 1      time of each
    chunks    4 | 1 1 1 1    2 chunks: the variance and the maximum are least

The measures are the variance of the chunks' compute time, the variance of their parameter bytes, and the
largest compute time, which limits the speed of a full pipeline. As the total is the same for every division,
the least variance is the least sum of squares, and a sum over chunks can be minimized from the last chunk on
(dynamic programming): for n blocks and k chunks in O(n^2 k). Numbers are integers, so the result is exact.

Several divisions may have the same measure. Of those with the same largest time, the ones with the least
variance of time are taken. Of those that are left, the one with the fewest blocks in the first chunk, then in
the second, and so on, because in 1F1B the first ranks hold the most activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import add
from typing import Literal

Balance = Literal["time", "memory", "bottleneck"]


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """The profile of a block of the model."""

    time: int
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
    before, num_blocks = list(accumulate(numbers, initial=0)), len(blocks)

    def weight(first: int, end: int) -> int:
        return before[end] - before[first]

    most = weight(0, num_blocks)
    if balance == "bottleneck":
        most, _ = _best_ends(num_blocks, num_chunks, weight, max, most)
    _, ends = _best_ends(num_blocks, num_chunks, lambda *run: weight(*run) ** 2, add, most**2)
    return tuple(map(range, [0, *ends[:-1]], ends))


def _best_ends(
    num_blocks: int,
    num_chunks: int,
    cost: Callable[[int, int], int],
    join: Callable[[int, int], int],
    most: int,
) -> tuple[int, tuple[int, ...]]:
    """Return the least sum (`add`) or maximum (`max`) of the costs of chunks, and the ends of these chunks.

    Of several such divisions it is the first one in the order of the tie rule.

    Args:
        num_blocks: the blocks.
        num_chunks: the chunks.
        cost: the cost of a chunk, given its first and its next blocks.
        join: joins the costs of chunks.
        most: the most that a chunk may cost.
    """

    @cache
    def best(first: int, left: int) -> tuple[int, tuple[int, ...]] | None:
        """The least total for the blocks from `first` on in the chunks that are left."""
        if left == 1:
            last = cost(first, num_blocks)
            return (last, (num_blocks,)) if last <= most else None
        options = (
            (join(own, rest[0]), (end, *rest[1]))
            for end in range(first + 1, num_blocks - left + 2)
            if (own := cost(first, end)) <= most and (rest := best(end, left - 1)) is not None
        )
        return min(options, default=None)

    found = best(0, num_chunks)
    assert found is not None, "some division costs no more"
    return found
