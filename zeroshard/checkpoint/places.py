"""The places of a checkpoint's tensors: which box of a tensor lies at which byte of which file.

In the manifest, a tensor of n dimensions has a row of 2n + 2 integers for each of its boxes:

    {"weight": {"dtype": "float32", "shape": [5, 4], "boxes": [[0, 0, 3, 4, 0, 1088], [3, 0, 2, 4, 1, 1088]]}}
                                                               offsets sizes |  the first byte
                                                                             the rank, whose file it is

The elements of a box lie there row by row, without gaps, as the machine has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zeroshard.checkpoint.boxes import Box, tiles

_MAX_DIMS = 64
"""As many dimensions as torch computes with."""
_MAX_SIZE = 1 << 62
"""Torch counts elements in 63 bits."""


class StoredBox(NamedTuple):
    """A part of a tensor in a file."""

    box: Box
    rank: int
    """The rank that wrote it, into `file_of(rank)`."""
    start: int
    """The first byte of its elements in that file."""

    @property
    def file(self) -> str:
        return file_of(self.rank)


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


def file_of(rank: int) -> str:
    """Return the name of the file with the tensors that a rank wrote."""
    return f"__{rank}_0.distcp"  # as torch.distributed.checkpoint calls them


def to_json(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the places of tensors as the manifest has them."""
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "boxes": [[*box.offsets, *box.sizes, rank, start] for box, rank, start in tensor.boxes],
        }
        for name, tensor in tensors.items()
    }


def from_json(content: Mapping[str, Any], num_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Return the tensors of a manifest.

    Args:
        content: what `to_json` gave, from a file that may say anything.
        num_bytes: the size of each file.

    Raises:
        ValueError, TypeError, KeyError: the boxes do not tile a tensor, or are not inside of their files.
    """
    left = dict(num_bytes)  # so that all tensors together are no larger than the files
    return {name: _from_json(name, entry, num_bytes, left) for name, entry in content.items()}


def _from_json(
    name: str, entry: Mapping[str, Any], num_bytes: Mapping[str, int], left: dict[str, int]
) -> StoredTensor:
    dtype, shape = getattr(torch, str(entry["dtype"]), None), tuple(entry["shape"])
    if not isinstance(dtype, torch.dtype) or not _has_plain_elements(dtype):
        raise ValueError(f"'{name}': expected a dtype whose elements are plain numbers")
    if len(shape) > _MAX_DIMS or any(type(size) is not int or not 0 <= size < _MAX_SIZE for size in shape):
        raise ValueError(f"'{name}': expected a shape, came {entry['shape']!r:.100}")
    boxes = []
    for row in entry["boxes"]:
        if len(row) != 2 * len(shape) + 2 or any(type(value) is not int or value < 0 for value in row):
            raise ValueError(f"'{name}': expected {2 * len(shape) + 2} integers for a box, came {row!r:.100}")
        offsets, sizes, (rank, start) = row[: len(shape)], row[len(shape) : -2], row[-2:]
        if any(first + size > end for first, size, end in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"'{name}': has a box {row!r:.100} outside of its shape {shape}")
        stored = StoredBox(Box(tuple(offsets), tuple(sizes)), rank, start)
        size = math.prod(sizes) * dtype.itemsize
        if start + size > num_bytes.get(stored.file, -1):
            raise ValueError(f"'{name}': has a box that is not all in the file '{stored.file}'")
        left[stored.file] -= size
        if left[stored.file] < 0:
            raise ValueError(f"'{name}': its boxes and those before it overlap in the file '{stored.file}'")
        boxes.append(stored)
    if not tiles([stored.box for stored in boxes], shape):
        raise ValueError(f"'{name}': expected boxes that make up its shape {shape}, each element once")
    return StoredTensor(dtype, shape, tuple(boxes))


def _has_plain_elements(dtype: torch.dtype) -> bool:
    """Return False for quantized elements and bits, which do not say what they mean."""
    return dtype.is_floating_point or dtype.is_complex or dtype in _INTEGERS


_INTEGERS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
