"""The elements that each rank owns: integers in, integers out.

A group of parameters lies in one flat, padded range of elements that is cut into equal shards:

    elements  0        256       512       768       1024
              |--w1: 600 elements------|.....|--b1: 200--|....|--w2 ...
              '-- each parameter starts on a multiple of BLOCK = 256 --'
    shard 0 = [0, K)   shard 1 = [K, 2K)  ...     K a multiple of BLOCK

So a rank's part of a parameter is one contiguous slice, from the start of a block of it. An
all-gather of the shards gives the flat range itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

BLOCK = 256
"""Elements that are never cut by a shard boundary: a block of 8-bit optimizer states."""
MIN_8BIT_SIZE = 4096
"""Elements of a whole parameter from which its states are quantized, as in bitsandbytes."""


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def num_blocks(num: int) -> int:
    """The number of blocks of `num` elements; the last block may be cut short."""
    return -(-num // BLOCK)


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of elements [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The range as a Python slice."""
        return slice(self.start, self.stop)

    def shifted(self, by: int) -> Span:
        """Return the range moved by `by` elements."""
        return Span(self.start + by, self.stop + by)

    def intersect(self, other: Span) -> Span:
        """The common range; an empty range inside `other` if there is none."""
        start = min(max(self.start, other.start), other.stop)
        return Span(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True)
class Layout:
    """The places of `sizes` (elements per parameter) in a flat range shared by `num_ranks` ranks.

    With `num_replicas` groups of so many ranks, each shard can be cut evenly over the ranks that hold it.
    """

    sizes: tuple[int, ...]
    num_ranks: int
    num_replicas: int = 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each parameter: a multiple of BLOCK."""
        *starts, _ = accumulate((round_up(size, BLOCK) for size in self.sizes), initial=0)
        return tuple(starts)

    @cached_property
    def total(self) -> int:
        """Padded elements of the whole range: a multiple of BLOCK * num_ranks * num_replicas."""
        row = BLOCK * self.num_ranks * self.num_replicas
        return round_up(sum(round_up(size, BLOCK) for size in self.sizes), row)

    @property
    def shard_size(self) -> int:
        """Elements that each rank owns, padding included."""
        return self.total // self.num_ranks

    def shard(self, rank: int) -> Span:
        """Return the flat range that `rank` owns."""
        return Span(rank * self.shard_size, (rank + 1) * self.shard_size)

    def parameter(self, index: int) -> Span:
        """The flat range of a parameter, its padding left out."""
        return Span(self.offsets[index], self.offsets[index] + self.sizes[index])

    def owned(self, index: int, rank: int) -> Span:
        """The part of a parameter that `rank` owns, counted from the parameter's own first element.

        The part is empty if the rank owns nothing of the parameter; else it starts on a block.
        """
        whole = self.parameter(index)
        return self.shard(rank).intersect(whole).shifted(-whole.start)

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The padding: every flat range that belongs to no parameter, in order."""
        ends = (self.parameter(index).stop for index in range(len(self.sizes)))
        starts = (*self.offsets, self.total)[1:]
        gaps = (Span(end, start) for end, start in zip(ends, starts, strict=True))
        return tuple(gap for gap in gaps if gap.size)
