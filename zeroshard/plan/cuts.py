"""The parts of parameters that the ranks of a tensor group hold: integers in, integers out.

A parameter is cut along one dimension. Where it is several matrices in one (queries, keys and values), each
of these sections is cut by itself, so that every rank has a part of each:

    sections    |-- q: 8 ------|-- k: 4 ---|-- v: 4 ---|      2 ranks, heads of 2 elements
    rank 0      [0, 4)          [8, 10)     [12, 14)
    rank 1             [4, 8)       [10, 12)    [14, 16)

A section consists of heads that are never divided.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from zeroshard.plan.layout import Span


@dataclass(frozen=True, slots=True)
class Section:
    """A run of a dimension that is cut by itself."""

    size: int
    """Elements along the dimension."""
    unit: int = 1
    """Elements that stay together: the size of a head."""


@dataclass(frozen=True)
class Cut:
    """A parameter of some shape, cut along a dimension over the ranks of a tensor group.

    Args:
        name: the name of the parameter, for errors.
        shape: the shape of the whole.
        dim: the dimension.
        num_ranks: the ranks of the group.
        sections: the sections of the dimension, in order; () for one section without heads.

    Raises:
        ValueError: the sections do not fill the dimension, or the ranks do not divide one of them.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    num_ranks: int
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        if sum(section.size for section in self._sections) != self.shape[self.dim]:
            sizes = [section.size for section in self._sections]
            raise ValueError(
                f"'{self.name}': expected sections of {self.shape[self.dim]} elements together, the size of "
                f"dimension {self.dim}, got {sizes}"
            )
        for section in self._sections:
            self._check(section)

    @property
    def _sections(self) -> tuple[Section, ...]:
        return self.sections or (Section(self.shape[self.dim]),)

    def _check(self, section: Section) -> None:
        where = f"'{self.name}', dimension {self.dim} of shape {self.shape}"
        if section.size < 1 or section.unit < 1 or section.size % section.unit:
            raise ValueError(f"{where}: {section.size} elements are no whole heads of {section.unit}")
        num_heads = section.size // section.unit
        if num_heads % self.num_ranks:
            what = f"{num_heads} heads of {section.unit}" if section.unit > 1 else f"{num_heads} elements"
            what = what.replace("heads", "head") if num_heads == 1 else what
            raise ValueError(
                f"{where}: {what} cannot be divided over mesh.tp={self.num_ranks} ranks; expected a multiple "
                f"of {self.num_ranks}"
            )

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The ranges of the dimension that a rank holds, one of each section, in order."""
        spans, start = [], 0
        for section in self._sections:
            size = section.size // self.num_ranks
            first = start + rank * size
            spans.append(Span(first, first + size))
            start += section.size
        return tuple(spans)

    def placed(self, rank: int, held: Span, inner: int = 1) -> Iterator[tuple[Span, Span]]:
        """The pieces of a range of a rank's part: along the dimension of the part, and of the whole.

        Args:
            rank: the rank.
            held: the range.
            inner: elements of a place along the dimension, in which the ranges count.
        """
        start = 0
        for span in self.spans(rank):
            piece = Span(start, start + span.size * inner).intersect(held)
            if piece.size:
                yield piece, piece.shifted(span.start * inner - start)
            start += span.size * inner

    def runs(self, rank: int, held: Span) -> Iterator[Span]:
        """The flat ranges of the whole that a flat range of a rank's part is made of, in order."""
        inner = math.prod(self.shape[self.dim + 1 :])
        row, whole_row = self.local_shape[self.dim] * inner, self.shape[self.dim] * inner
        for number in range(held.start // row, -(-held.stop // row)):
            inside = held.shifted(-number * row).intersect(Span(0, row))
            for _, piece in self.placed(rank, inside, inner):
                yield piece.shifted(number * whole_row)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's part, the same on all ranks."""
        size = sum(span.size for span in self.spans(0))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def heads(*counts: int, size: int) -> tuple[Section, ...]:
    """Sections of so many heads each, of `size` elements."""
    return tuple(Section(count * size, size) for count in counts)
