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
from typing import NamedTuple

from zeroshard.plan.layout import Span


@dataclass(frozen=True, slots=True)
class Section:
    """A run of a dimension that is cut by itself."""

    size: int
    """Elements along the dimension."""
    unit: int = 1
    """Elements that stay together: the size of a head."""


class Run(NamedTuple):
    """Elements that lie side by side in the whole and in a part, both flattened."""

    whole: Span
    part: Span


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
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(f"'{self.name}': expected a dimension of shape {self.shape}, got {self.dim}")
        if self.num_ranks < 1:
            raise ValueError(f"'{self.name}': expected at least 1 rank, got {self.num_ranks}")
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
        """The ranges of the dimension that a rank holds, one of each section, in order.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"expected a rank in [0, {self.num_ranks}), got {rank}")
        spans, start = [], 0
        for section in self._sections:
            size = section.size // self.num_ranks
            first = start + rank * size
            spans.append(Span(first, first + size))
            start += section.size
        return tuple(spans)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's part, the same on all ranks."""
        size = sum(span.size for span in self.spans(0))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def runs(self, rank: int, within: Span) -> Iterator[Run]:
        """List the runs that make up a range of a rank's flattened part, in order."""
        inner, spans = math.prod(self.shape[self.dim + 1 :]), self.spans(rank)
        size = max(1, self.local_shape[self.dim] * inner)
        for row in range(within.start // size, -(-within.stop // size)):
            place = row * size
            for span in spans:
                part = Span(place, place + span.size * inner)
                place, held = part.stop, part.intersect(within)
                if held.size:
                    start = (row * self.shape[self.dim] + span.start) * inner + held.start - part.start
                    yield Run(Span(start, start + held.size), held)


def heads(*counts: int, size: int) -> tuple[Section, ...]:
    """Sections of so many heads each, of `size` elements."""
    return tuple(Section(count * size, size) for count in counts)
