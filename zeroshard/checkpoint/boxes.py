"""Flat slices as n-dimensional boxes: integers in, integers out.

A rank owns a flat range of a parameter's elements. As boxes of the full shape it is, in two dimensions:

    . . . a a a      a: the rest of a row       at most 2n - 1 boxes in n dimensions,
    b b b b b b      b: whole rows              in the order of the flat range
    b b b b b b
    c c . . . .      c: the start of a row
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import add

from zeroshard.plan.layout import Span

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements [offset, offset + size) of each dimension of a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common part; None where there is none."""
        offsets, sizes = [], []
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + m, b + n)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))


def whole(shape: Shape) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def boxes_of(shape: Shape, span: Span) -> list[Box]:
    """The boxes that a flat range of a tensor consists of, in the order of the range."""
    if not span.size:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((span.start,), (span.size,))]
    row = math.prod(shape[1:])
    (first, begin), (last, end) = divmod(span.start, row), divmod(span.stop, row)
    if first == last:
        return _in_row(shape, first, Span(begin, end))
    head = _in_row(shape, first, Span(begin, row)) if begin else []
    start = first + bool(begin)
    middle = [Box((start, *(0 for _ in shape[1:])), (last - start, *shape[1:]))] if start < last else []
    return head + middle + _in_row(shape, last, Span(0, end))


def _in_row(shape: Shape, index: int, span: Span) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes_of(shape[1:], span)]


def split(box: Box, max_numel: int) -> Iterator[Box]:
    """Pieces of at most `max_numel` elements, cut along the first dimension that can be cut, in order.

    The pieces of what was one flat range are flat ranges too.
    """
    if box.numel <= max_numel:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    num_rows = max(1, max_numel // math.prod(box.sizes[dim + 1 :]))
    for start in range(0, box.sizes[dim], num_rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(num_rows, sizes[dim] - start)
        yield from split(Box(tuple(offsets), tuple(sizes)), max_numel)


def tiles(boxes: Sequence[Box], shape: Shape) -> bool:
    """True if boxes that lie inside a tensor hold each of its elements once."""
    filled = [box for box in boxes if box.numel]
    if sum(box.numel for box in filled) != math.prod(shape):
        return False
    open_boxes: list[Box] = []  # those that reach into the row at which the next one begins
    for box in sorted(filled, key=lambda box: box.offsets):
        open_boxes = [other for other in open_boxes if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        if any(box.intersect(other) for other in open_boxes):
            return False
        open_boxes += [box] if shape else []
    return True


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that lie one after the other in two boxes, each stored row by row."""

    source: int
    """The first element, counted in the one box."""
    target: int
    """The same element, counted in the other."""
    numel: int


def runs(source: Box, target: Box) -> Iterator[Run]:
    """The elements that two boxes of one tensor share."""
    common = source.intersect(target)
    if common is None:
        return
    # Trailing dimensions that are whole in both, and the one before them, lie in one piece.
    outer = len(common.sizes)
    while outer and common.sizes[outer - 1] == source.sizes[outer - 1] == target.sizes[outer - 1]:
        outer -= 1
    outer = max(0, outer - 1)
    numel = math.prod(common.sizes[outer:])
    for index in product(*(range(size) for size in common.sizes[:outer])):
        corner = (*map(add, common.offsets, index), *common.offsets[outer:])
        yield Run(_position(source, corner), _position(target, corner), numel)


def _position(box: Box, element: Shape) -> int:
    """Where an element is in a box that is stored row by row."""
    position = 0
    for at, offset, size in zip(element, box.offsets, box.sizes, strict=True):
        position = position * size + at - offset
    return position
