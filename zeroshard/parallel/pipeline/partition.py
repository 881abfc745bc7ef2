"""The division of a model's blocks into chunks: contiguous, each with at least one block, best by a measure.

    blocks    4 1 1 1 1      time of each
    chunks    4 | 1 1 1 1    2 chunks: the variance is least

The measures are the variance of the chunks' compute time, and the variance of their parameter bytes. As the
total is the same for every division, the least variance is the least sum of squares, and a sum over chunks
can be minimized from the last chunk on (dynamic programming): for n blocks and k chunks in O(n^2 k) at most.
The sum grows faster the longer a chunk is, so that a first chunk that begins earlier ends no later (Monge's
condition). Numbers are integers, so the result is exact.

Of several divisions with the same measure the one with the fewest blocks in the first chunk is taken, then in
the second, and so on, because in 1F1B the first ranks hold the most activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Balance = Literal["time", "memory"]


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
    # The least sum of squares for the blocks from each one on, in one chunk, and then in one chunk more.
    least = [(before[-1] - start) ** 2 for start in before[:-1]]
    ends: list[list[int]] = []  # of the first chunk, for the blocks from each one on
    for _ in range(1, num_chunks):
        found = [(0, len(least) - 1)]
        for first in reversed(range(len(least) - 1)):
            near = range(first + 1, found[-1][1] + 1)  # one that begins earlier ends no later
            found.append(min(((before[at] - before[first]) ** 2 + least[at], at) for at in near))
        least, own = map(list, zip(*found[:0:-1], strict=True))
        ends.append(own)
    cuts = [0]
    for own in reversed(ends):
        cuts.append(own[cuts[-1]])
    return tuple(map(range, cuts, [*cuts[1:], num_blocks]))
