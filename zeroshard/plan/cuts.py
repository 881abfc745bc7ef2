"""The parts of parameters that the ranks of a tensor group hold: integers in, integers out.

A parameter is cut along one dimension. Where it is several matrices in one (queries, keys and values), each
of these sections is cut by itself, so that every rank has a part of each:

    sections    |-- q: 8 ------|-- k: 4 ---|-- v: 4 ---|      2 ranks, heads of 2 elements
    rank 0      [0, 4)          [8, 10)     [12, 14)
    rank 1             [4, 8)       [10, 12)    [14, 16)

A section consists of heads that are never divided. If there are fewer heads than ranks, as for keys and
values under grouped-query attention, consecutive ranks hold the same one.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Ainslie et al. 2023, "GQA".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        is_shared = section.unit > 1 and self.num_ranks % num_heads == 0
        if num_heads % self.num_ranks and not is_shared:
            what, other = f"{num_heads} elements", ""
            if section.unit > 1:
                what, other = f"{num_heads} heads of {section.unit}", " or a divisor"
            raise ValueError(
                f"{where}: {what} cannot be divided over mesh.tp={self.num_ranks} ranks; expected a multiple"
                f"{other} of {self.num_ranks}"
            )

    def copies(self, section: int = 0) -> int:
        """The number of ranks that hold the same part of a section: 1 but for fewer heads than ranks."""
        size, unit = self._sections[section].size, self._sections[section].unit
        return max(1, self.num_ranks * unit // size)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The ranges of the dimension that a rank holds, one of each section, in order.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"expected a rank in [0, {self.num_ranks}), got {rank}")
        spans, start = [], 0
        for number, section in enumerate(self._sections):
            copies = self.copies(number)
            size = section.size * copies // self.num_ranks
            first = start + rank // copies * size
            spans.append(Span(first, first + size))
            start += section.size
        return tuple(spans)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's part, the same on all ranks."""
        size = sum(span.size for span in self.spans(0))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def local_numel(self) -> int:
        """Elements of a rank's part."""
        return math.prod(self.local_shape)

    def counted(self, rank: int) -> tuple[Span, ...]:
        """The ranges of a rank's part, along the dimension, that this rank counts.

        Over all ranks each element of the whole is counted once: where several hold the same head, the first
        of them counts it.
        """
        counted, start = [], 0
        for number, span in enumerate(self.spans(rank)):
            if rank % self.copies(number) == 0:
                counted.append(Span(start, start + span.size))
            start += span.size
        return tuple(counted)


def heads(*counts: int, size: int) -> tuple[Section, ...]:
    """Sections of so many heads each, of `size` elements."""
    return tuple(Section(count * size, size) for count in counts)


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Join ranges that follow each other without a gap."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        elif span.size:
            found.append(span)
    return tuple(found)
