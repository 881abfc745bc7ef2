"""The places of a checkpoint's tensors: which box of a tensor lies at which byte of which file.

In the manifest, a tensor of n dimensions has a row of 2n + 2 integers for each of its boxes:

    {"weight": {"dtype": "float32", "shape": [5, 4], "boxes": [[0, 0, 3, 4, 0, 1088], [3, 0, 2, 4, 1, 1088]]}}
                                                               offsets sizes |  the first byte
                                                                             the rank, whose file it is

The elements of a box lie there row by row, without gaps, as the machine has them.

A rank owns a flat range of a parameter's elements. As boxes of the full shape it is, in two dimensions:

    . . . a a a      a: the rest of a row       at most 2n - 1 boxes in n dimensions,
    b b b b b b      b: whole rows              in the order of the flat range
    b b b b b b
    c c . . . .      c: the start of a row
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from zeroshard.codec import Size, dtype_name
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

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of its elements in a tensor with the elements of a box around it."""
        starts = map(sub, self.offsets, outer.offsets)
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def span_in(self, outer: Box) -> Span:
        """The smallest flat range with its elements of a box around it that is stored row by row."""
        first = last = 0
        for at, size in zip(self.within(outer), outer.sizes, strict=True):
            first, last = first * size + at.start, last * size + at.stop - 1
        return Span(first, last + 1)

    def cut(self, dim: int, start: int, size: int) -> Box:
        """The box with another range of a dimension."""
        offsets, sizes = self.offsets, self.sizes
        return Box((*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]))


def whole(shape: Shape) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def boxes_of(shape: Shape, span: Span) -> list[Box]:
    """The boxes that a flat range of a tensor consists of, in the order of the range."""
    if not span.size:
        return []
    if not shape:
        return [Box((), ())]
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
        size = min(num_rows, box.sizes[dim] - start)
        yield from split(box.cut(dim, box.offsets[dim] + start, size), max_numel)


_MAX_BYTES = 1 << 62
"""The most bytes of a tensor with one element more in each dimension, so that no sum or product here exceeds
63 bits."""
_MAX_CORNERS = 1 << 26
"""The most corners of the boxes of one tensor."""

Row = Sequence[int]


def _is_plain(dtype: torch.dtype) -> bool:
    """Return True unless elements do not say what they mean: quantized ones (quint8) and bits (bits8)."""
    return not dtype_name(dtype).startswith(("q", "bits"))


class StoredBox(NamedTuple):
    """A part of a tensor in a file."""

    box: Box
    rank: int
    """The rank that wrote it, into `file_of(rank)`."""
    start: int
    """The first byte of its elements in that file."""

    @property
    def row(self) -> Row:
        """The box as the manifest has it."""
        return [*self.box.offsets, *self.box.sizes, self.rank, self.start]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, as the manifest has it.

    Raises:
        ValueError: the shape is too large, or a box has not as many integers as it must.
    """

    dtype: Annotated[torch.dtype, _is_plain]
    shape: tuple[Size, ...]
    boxes: list[Any]
    """The boxes as rows of integers: a thousand ranks have millions of boxes, and a reader looks at few."""

    def __post_init__(self) -> None:
        if math.prod(size + 1 for size in self.shape) * self.dtype.itemsize >= _MAX_BYTES:
            raise ValueError("expected a smaller shape")
        num = 2 * len(self.shape) + 2
        if any(len(row) != num or set(map(type, row)) != {int} for row in self.boxes):
            raise ValueError(f"expected {num} integers for each box")

    @property
    def parts(self) -> list[StoredBox]:
        """The boxes that it consists of."""
        n = len(self.shape)
        return [StoredBox(Box(tuple(row[:n]), tuple(row[n:-2])), row[-2], row[-1]) for row in self.boxes]


def file_of(rank: int) -> str:
    """Return the name of the file with the tensors that a rank wrote."""
    return f"__{rank}_0.distcp"  # as torch.distributed.checkpoint calls them


def check_places(tensors: Mapping[str, StoredTensor], num_bytes: Mapping[str, int]) -> None:
    """Check the boxes of tensors from a manifest, which may say anything.

    Args:
        tensors: the tensors, by name.
        num_bytes: the size of each file.

    Raises:
        ValueError, OverflowError: the boxes do not tile a tensor, or are not inside of files in the list.
    """
    for name, tensor in tensors.items():
        offsets, sizes, ranks, starts = _columns(tensor)
        stops = starts + sizes.prod(axis=1) * tensor.dtype.itemsize
        for rank in np.unique(ranks).tolist():
            own = ranks == rank
            if starts[own].min() < 0 or stops[own].max() > num_bytes.get(file_of(rank), 0):
                raise ValueError(f"'{name}': has a box that is not all in the file '{file_of(rank)}'")
        if (offsets < 0).any() or (sizes < 0).any() or not tile(tensor):
            raise ValueError(f"'{name}': expected boxes that make up its shape {tensor.shape}, without gaps")


def _columns(tensor: StoredTensor) -> tuple[Any, Any, Any, Any]:
    """Return int64 offsets [k, n], sizes [k, n], ranks [k] and first bytes [k] of k boxes in n dimensions."""
    n = len(tensor.shape)
    table = np.array(tensor.boxes, dtype=np.int64).reshape(-1, 2 * n + 2)
    return table[:, :n], table[:, n : 2 * n], table[:, -2], table[:, -1]


def tile(tensor: StoredTensor) -> bool:
    """Return True if boxes that lie inside of a tensor hold each of its elements once.

    A corner of a box counts +1 or -1, by the number of dimensions in which it is the end of the box. The sums
    of these at all places say how many boxes hold each element. So the sums are the same as for the whole
    tensor in one box exactly if each element is held once.

    Raises:
        ValueError: the boxes have too many corners.
    """
    offsets, sizes, *_ = _columns(tensor)
    if (len(offsets) + 1) << len(tensor.shape) > _MAX_CORNERS:
        raise ValueError(f"{len(offsets)} boxes of a tensor of shape {tensor.shape} have too many corners")
    places = np.zeros((1, len(offsets) + 1), dtype=np.int64)  # [corners, the tensor and its boxes]
    signs = np.ones((1, len(offsets) + 1), dtype=np.int64)
    signs[0, 0] = -1
    for dim, size in enumerate(tensor.shape):
        starts = np.append(0, offsets[:, dim])
        ends = starts + np.append(size, sizes[:, dim])
        places = np.concatenate([places * (size + 1) + starts, places * (size + 1) + ends])
        signs = np.concatenate([signs, -signs])
    _, numbers = np.unique(places, return_inverse=True)
    return not np.bincount(numbers.ravel(), signs.ravel()).any()
