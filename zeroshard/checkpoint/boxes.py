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
from itertools import islice, product
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
        """The number of elements."""
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


_STEPS_PER_BOX = 64
"""The most work of `tiles`, so that a crafted checkpoint cannot keep it busy. A box of a flat slice takes a
step for each dimension. Where 8 ranks also hold a matrix by columns, a box takes up to 8 times as many."""


def tiles(boxes: Sequence[Box], shape: Shape) -> bool:
    """Return True if boxes that lie inside a tensor hold each of its elements once.

    Raises:
        ValueError: the boxes cross each other so often that it would take long to tell.
    """
    filled = [box for box in boxes if box.numel]
    if sum(box.numel for box in filled) != math.prod(shape):
        return False
    return not filled or _has_no_hole(filled, shape, 0, iter(range(_STEPS_PER_BOX * (len(filled) + 64))))


def _has_no_hole(boxes: Sequence[Box], shape: Shape, dim: int, steps: Iterator[int]) -> bool:
    """Cut along a dimension where a box begins or ends; look at each slab by its further dimensions."""
    if dim == len(shape):
        return True
    waiting = sorted(boxes, key=lambda box: box.offsets[dim], reverse=True)
    cuts = sorted({box.offsets[dim] for box in boxes} | {box.offsets[dim] + box.sizes[dim] for box in boxes})
    if cuts[0] > 0 or cuts[-1] < shape[dim]:
        return False
    inside: list[Box] = []
    for start in cuts[:-1]:
        inside = [box for box in inside if box.offsets[dim] + box.sizes[dim] > start]
        while waiting and waiting[-1].offsets[dim] == start:
            inside.append(waiting.pop())
        if len(list(islice(steps, len(inside)))) < len(inside):
            raise ValueError(
                f"the boxes of a tensor of shape {shape} overlap in too many places to be checked"
            )
        if not inside or not _has_no_hole(inside, shape, dim + 1, steps):
            return False
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
    """Return the position of an element in a box that is stored row by row."""
    position = 0
    for at, offset, size in zip(element, box.offsets, box.sizes, strict=True):
        position = position * size + at - offset
    return position
