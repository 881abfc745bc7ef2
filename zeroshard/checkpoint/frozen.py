"""Frozen parameters that a checkpoint leaves out, and how one tells that the present ones are the same.

Each rank computes the crc32 of its own slices, and those of a parameter are joined to the crc32 of its whole
bytes: the same at any number of ranks and stage, and what zlib.crc32 gives for the bytes of the whole tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from zeroshard.checkpoint.agreed import on_all
from zeroshard.checkpoint.reader import Stored
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, TensorSlice, dtype_name, parameter_slices
from zeroshard.sharding.runtime import Runtime
from zeroshard.tiers.places import TierMemory

_POLYNOMIAL = 0xEDB88320
"""The polynomial of crc32, the bit of the highest power last."""


class Piece(NamedTuple):
    """A rank's message about its slice of a parameter."""

    name: str
    start: int
    num_bytes: int
    crc32: int


def frozen_names(runtime: Runtime) -> list[str]:
    """The parameters that were frozen at initialize: no optimizer can have changed them."""
    return [p.fqn for buffer in runtime.buffers if not buffer.trainable for p in buffer.sharded]


def measure_pieces(runtime: Runtime, names: Collection[str]) -> list[Piece]:
    """Checksums of this rank's slices of some parameters; over all ranks, each element once."""
    return [_measure(part, runtime.context.memory) for part in parameter_slices(runtime, names)]


def _measure(part: TensorSlice, memory: TierMemory) -> Piece:
    crc, step = 0, max(1, MAX_BOX_BYTES // part.data.element_size())
    for at in range(0, part.data.numel(), step):
        values = part.data[at : at + step]
        memory.fetch(values)
        crc = zlib.crc32(values.cpu().contiguous().view(torch.uint8).numpy().data, crc)
        memory.rest(values)
    return Piece(part.name, part.start, part.data.nbytes, crc)


def join_pieces(pieces: Iterable[Piece]) -> dict[str, int]:
    """The crc32 of each parameter, from the slices of all ranks."""
    sums: dict[str, int] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.start)):
        sums[piece.name] = join(sums.get(piece.name, 0), piece.crc32, piece.num_bytes)
    return sums


def join(first: int, second: int, num_bytes: int) -> int:
    """The crc32 of bytes, from those of their first part and of their second one.

    Args:
        first: of the first part.
        second: of the second part.
        num_bytes: of the second part.
    """
    power, shift = 1 << 31, 1 << 30  # x^0; x^1, squared in each turn: x^(8 n) moves a sum by n bytes
    rest = 8 * num_bytes
    while rest:
        if rest & 1:
            power = _multiply(power, shift)
        shift = _multiply(shift, shift)
        rest >>= 1
    return _multiply(power, first) ^ second


def _multiply(one: int, other: int) -> int:
    """The product of two polynomials over GF(2) modulo that of crc32."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


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
    left_out = [parameter for parameter in runtime.parameters if names[parameter.fqn] in saved]
    if not left_out:
        return
    wanted = [parameter.fqn for parameter in left_out]
    label = "comparison of frozen parameters"
    everyone = on_all(runtime.context.axes.dp, label, lambda: measure_pieces(runtime, wanted))
    present = join_pieces(piece for pieces in everyone for piece in pieces)
    for parameter in left_out:
        name, dtype = names[parameter.fqn], dtype_name(parameter.dtype)
        if records[name].dtype != dtype:
            found = f"are {dtype}, not {records[name].dtype}"
        elif present.get(parameter.fqn, 0) != saved[name]:
            found = "are others"
        else:
            continue
        raise ValueError(
            f"'{stored.directory}' leaves out the frozen parameter '{parameter.fqn}', and its present "
            f"values {found}: expected a model with the same frozen parameters as at saving. Build it from "
            "the same base, or save with Checkpoint(frozen=True)"
        )
