"""Files of safetensors: the places of their tensors, reads of a part of a tensor, the start of a new file.

    8 bytes: N | N bytes of JSON: {name: {dtype, shape, data_offsets}} | data, row-major, little-endian

A flat range of elements is one range of bytes. safetensors' own reader slices by dimension, but a range may
start in the middle of a row; so the bytes are read directly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from zeroshard.codec import Damage, Size, naming_damage, typed
from zeroshard.plan.layout import Span
from zeroshard.stores.host import host_memory

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor in a file of safetensors."""

    file: Path
    offset: int
    """The bytes before its first element."""
    shape: tuple[int, ...]
    file_dtype: torch.dtype
    dtype: torch.dtype
    """The dtype that it is read as."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def cast(self, dtype: torch.dtype) -> FileTensor:
        """Return the same tensor, read as another dtype."""
        return replace(self, dtype=dtype)

    def read(self, *spans: Span) -> Tensor:
        """[elements]: ranges of the flattened tensor, one after the other.

        Raises:
            DamageError: the file ends too early.
        """
        size, num_read = self.file_dtype.itemsize, 0
        raw = host_memory(sum(span.size for span in spans) * size, pinned=False)
        with self.file.open("rb") as file:
            for span in spans:
                fill(file, self.offset + span.start * size, raw[num_read : num_read + span.size * size])
                num_read += span.size * size
        return raw.view(self.file_dtype).to(self.dtype)

    def __str__(self) -> str:
        """Describe it in the same words on all ranks, also if each has its own copy of the file."""
        return f"in {self.file.name} at byte {self.offset} as {self.file_dtype}"


def fill(file: Any, start: int, memory: Tensor) -> None:
    """Read the bytes of an open file from `start` on into memory, [n] of uint8 on the host.

    Raises:
        DamageError: the file ends too early.
    """
    file.seek(start)
    if file.readinto(memory.numpy().data) != memory.numel():
        raise Damage.SIZE.of(Path(file.name), start + memory.numel(), os.fstat(file.fileno()).st_size)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, ...]
    """Its first byte after the header, and the byte after its last one."""


def read_header(file: Path) -> dict[str, FileTensor]:
    """Return the tensors of a file, by name; no values are read.

    Raises:
        DamageError: the file is missing or shortened, or its header is not one of safetensors.
        ValueError: a dtype that is not one of `_DTYPES`.
    """
    with naming_damage(file), file.open("rb") as opened:
        most, start = file.stat().st_size, 8 + int.from_bytes(opened.read(8), "little")
        if start > most:
            raise Damage.SIZE.of(file, start, most)
        header: Any = json.loads(opened.read(start - 8))
        header.pop("__metadata__", None)
        entries: dict[str, _Entry] = typed(dict[str, _Entry], header, "header")
        spans = {name: Span(*entry.data_offsets) for name, entry in entries.items()}
    if (stop := max((start + span.stop for span in spans.values()), default=0)) > most:
        raise Damage.SIZE.of(file, stop, most)
    tensors: dict[str, FileTensor] = {}
    for name, entry in entries.items():
        if (dtype := _DTYPES.get(entry.dtype)) is None:
            known = ", ".join(_DTYPES)
            raise ValueError(
                f"{file}: tensor '{name:.100}' has dtype {entry.dtype:.20}; expected one of {known}"
            )
        if spans[name].size != math.prod(entry.shape) * dtype.itemsize:
            raise Damage.CONTENT.of(file, f"another number of bytes than the shape of '{name}' has")
        offset = start + spans[name].start
        tensors[name] = FileTensor(file=file, offset=offset, shape=entry.shape, file_dtype=dtype, dtype=dtype)
    if sum(span.size for span in spans.values()) > most - start:
        raise Damage.CONTENT.of(file, "tensors that overlap")
    return tensors


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Beginning:
    """The start of a file, and the places of the tensors that follow."""

    header: bytes
    offsets: dict[str, int]
    """The first byte of each tensor in the file."""
    num_bytes: int
    """The size of the whole file."""


def begin_file(tensors: Mapping[str, TensorInfo]) -> Beginning:
    """Lay out a file; wide dtypes lie first, so that all are aligned.

    Raises:
        ValueError: a dtype that the format does not have.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"tensor '{name}' is {tensor.dtype}; safetensors: expected one of {', '.join(_DTYPES)}"
            )
        starts[name], end = end, end + tensor.num_bytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    header = len(content).to_bytes(8, "little") + content
    return Beginning(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_tensors(folder: str | os.PathLike[str]) -> dict[str, FileTensor]:
    """Return the tensors of a checkpoint by name: of model.safetensors, or of the files in its index.

    Raises:
        ValueError: no such folder, or no safetensors checkpoint in it.
        DamageError: a file is missing or damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"expected a folder on this machine (nothing is downloaded), got '{folder}'")
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE)
    if not (path / INDEX).is_file():
        pickled = [file.name for file in path.glob("*.bin")]
        hint = f"; {pickled[0]} is a pickle, which could run code: convert it" if pickled else ""
        raise ValueError(f"'{folder}': expected {SINGLE} or {INDEX}, found neither{hint}")
    with naming_damage(path / INDEX):
        content = json.loads((path / INDEX).read_bytes())
        places: dict[str, str] = typed(_WeightMap, content["weight_map"], "weight_map")
    files = {name: read_header(path / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise Damage.CONTENT.of(path / file, f"no tensor '{name}', which {INDEX} says is there")
    return {name: files[file][name] for name, file in places.items()}


def is_file_name(name: str) -> bool:
    """Return True for the name of a file, not a path."""
    return name.isprintable() and os.path.basename(name) == name and name not in ("", ".", "..")


_WeightMap = dict[str, Annotated[str, is_file_name]]
"""The file of each tensor, in the folder of the index."""
