"""Frozen parameters that a checkpoint leaves out, and the check that the present ones are the same.

The crc32 of a parameter is the crc32 of its whole bytes: the same at any number of ranks and stage. Each rank
computes a part of it from its own slices. crc32 is affine: over bytes of one length, the crc32 of a sum (xor)
is the sum of the crc32s and of the crc32 of zeros. So a slice counts as the whole parameter with zeros
elsewhere, and the ranges of two tensor ranks may lie in each other.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, reduce
from operator import xor
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.checkpoint.codec import dtype_name
from zeroshard.checkpoint.places import Box
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, Stored, TensorSlice, slices
from zeroshard.comm.collectives import on_all
from zeroshard.sharding.runtime import Runtime
from zeroshard.stores.store import TierMemory


class SliceSum(NamedTuple):
    """A rank's message about its slices of a parameter."""

    name: str
    num_bytes: int
    """Bytes of the whole parameter."""
    crc32: int
    """The crc32 of the slices with zeros elsewhere, without the part that is the same for all bytes."""


def frozen_names(runtime: Runtime) -> list[str]:
    """The parameters that were frozen at initialize: no optimizer can have changed them."""
    return [p.fqn for buffer in runtime.buffers if not buffer.trainable for p in buffer.sharded]


def measure_pieces(runtime: Runtime, names: Collection[str]) -> list[SliceSum]:
    """Checksums of this rank's slices of some parameters; over all ranks, each element once."""
    parts = slices(runtime, {name: name for name in names}, {}, written=True)
    return [measure(part, runtime.context.memory) for part in parts]


def measure(part: TensorSlice, memory: TierMemory) -> SliceSum:
    """The checksum of one slice of a parameter."""
    total, crc, itemsize = math.prod(part.shape), 0, part.data.element_size()
    for box, values in part.boxes(MAX_BOX_BYTES):
        memory.fetch(values)
        rows, last = _with_zeros(box, values.cpu(), part.shape)
        own = rows.contiguous().view(-1).view(torch.uint8).numpy().data
        sum_of_rows = zlib.crc32(own) ^ crc_of_zeros(len(own))
        crc ^= _moved(sum_of_rows, (total - last) * itemsize)
        memory.evict(values)
    return SliceSum(part.name, total * itemsize, crc)


def _with_zeros(box: Box, values: Tensor, shape: Sequence[int]) -> tuple[Tensor, int]:
    """Return the shortest flat range of a tensor that holds a box, with zeros around it, and its end."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), len(box.sizes) - 1)
    after = tuple(shape[dim + 1 :])
    rows = values.new_zeros((*box.sizes[: dim + 1], *after))
    own, first = rows, 0
    for inner in range(dim + 1, len(shape)):
        own = own.narrow(inner, box.offsets[inner], box.sizes[inner])
    own.copy_(values)
    for offset, size in zip(box.offsets[: dim + 1], shape, strict=False):
        first = first * size + offset
    return rows, (first + math.prod(box.sizes[: dim + 1])) * math.prod(after)


def join_pieces(pieces: Iterable[SliceSum]) -> dict[str, int]:
    """The crc32 of each parameter, from the slices of all ranks."""
    sums: dict[str, int] = {}
    for piece in pieces:
        if piece.name not in sums:
            sums[piece.name] = crc_of_zeros(piece.num_bytes)
        sums[piece.name] ^= piece.crc32
    return sums


def crc_of_zeros(num_bytes: int) -> int:
    """Return `zlib.crc32(bytes(num_bytes))`, in a time that grows with the number of digits."""
    ones = 0xFFFFFFFF
    return _moved(ones, num_bytes) ^ ones


def _moved(crc: int, num_bytes: int) -> int:
    """Return the change of a crc32 by bytes that are followed by so many others, from `crc` at their end."""
    for power in range(num_bytes.bit_length()):
        if num_bytes >> power & 1:
            crc = _times(_matrix(power), crc)
    return crc


@cache
def _matrix(power: int) -> tuple[int, ...]:
    """What becomes of each bit of a crc32 over 2**power bytes of zeros."""
    if power:
        half = _matrix(power - 1)
        return tuple(_times(half, column) for column in half)
    return tuple(zlib.crc32(b"\0", 1 << bit) ^ zlib.crc32(b"\0") for bit in range(32))


def _times(matrix: tuple[int, ...], crc: int) -> int:
    return reduce(xor, (column for bit, column in enumerate(matrix) if crc >> bit & 1), 0)


def check_frozen(runtime: Runtime, stored: Stored, names: Mapping[str, str]) -> None:
    """Compare the parameters that a checkpoint leaves out with the present ones; collective if there are any.

    Args:
        runtime: of the model.
        stored: the checkpoint.
        names: the stored name of each parameter.

    Raises:
        ValueError: naming the first one that is not.
    """
    saved, records = stored.manifest.frozen, stored.manifest.parameters
    if not saved:
        return
    left_out = [parameter for parameter in runtime.parameters if names[parameter.fqn] in saved]
    wanted = [parameter.fqn for parameter in left_out]
    label = "comparison of frozen parameters"
    everyone = on_all(runtime.context.axes.world, label, lambda: measure_pieces(runtime, wanted))
    present = join_pieces(piece for pieces in everyone for piece in pieces)
    for parameter in left_out:
        name = names[parameter.fqn]
        if records[name].dtype != parameter.dtype:
            found = f"are {dtype_name(parameter.dtype)}, not {dtype_name(records[name].dtype)}"
        elif present.get(parameter.fqn, 0) != saved[name]:
            found = "are others"
        else:
            continue
        raise ValueError(
            f"'{stored.directory}' leaves out the frozen parameter '{parameter.fqn}', and its present "
            f"values {found}: expected a model with the same frozen parameters as at saving. Build it from "
            "the same base, or save with Checkpoint(frozen=True)"
        )
