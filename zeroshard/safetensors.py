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
from typing import Any

import torch
from torch import Tensor

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
            RuntimeError: the file ends too early.
        """
        size, num_read = self.file_dtype.itemsize, 0
        raw = host_memory(sum(span.size for span in spans) * size, pinned=False)
        memory = raw.numpy().data
        with self.file.open("rb") as file:
            for span in spans:
                file.seek(self.offset + span.start * size)
                num_read += file.readinto(memory[num_read : num_read + span.size * size])
        if num_read != raw.numel():
            raise RuntimeError(f"{self.file}: expected {raw.numel()} bytes of a tensor, got {num_read}")
        return raw.view(self.file_dtype).to(self.dtype)

    def __str__(self) -> str:
        """Describe it in the same words on all ranks, also if each has its own copy of the file."""
        return f"in {self.file.name} at byte {self.offset} as {self.file_dtype}"


def read_header(file: Path) -> dict[str, FileTensor]:
    """Return the tensors of a file, by name; no values are read.

    Raises:
        ValueError: the file cannot be read, or its header is not one of safetensors.
    """
    header, end = _read_object(file, begins_with_size=True)
    header.pop("__metadata__", None)
    return {name: _tensor(file, end, name, entry) for name, entry in header.items()}


def _read_object(file: Path, *, begins_with_size: bool) -> tuple[dict[str, Any], int]:
    """Return the JSON object at the start of a file, and the bytes up to its end.

    Args:
        file: the file.
        begins_with_size: True if 8 bytes with the size of the JSON lie before it; False if it is the file.

    Raises:
        ValueError: with the name of the file.
    """
    try:
        with file.open("rb") as opened:
            start, size = 0, (most := file.stat().st_size)
            if begins_with_size:
                start, size = 8, int.from_bytes(opened.read(8), "little")
            content = json.loads(opened.read(size)) if size <= most else None
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # no UTF-8, no JSON, a number that is too long; or nested too deep
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object{' of safetensors' * begins_with_size}, got none")
    return content, start + size


def _tensor(file: Path, data_start: int, name: str, entry: Any) -> FileTensor:
    """Check one entry of a header."""
    match entry:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            if kind not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise ValueError(f"{file}: tensor '{name}' has dtype {kind}; expected one of {known}")
            dtype = _DTYPES[kind]
            is_inside = start >= 0 and data_start + stop <= file.stat().st_size
            # bool is a kind of int
            are_sizes = all(type(size) is int and size >= 0 for size in (*shape, start, stop))
            if are_sizes and is_inside and stop - start == math.prod(shape) * dtype.itemsize:
                return FileTensor(
                    file=file,
                    offset=data_start + start,
                    shape=tuple(shape),
                    file_dtype=dtype,
                    dtype=dtype,
                )
    raise ValueError(f"{file}: expected all bytes of tensor '{name}', got a damaged or shortened file")


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
        ValueError: no such folder, or no safetensors checkpoint in it; a file that is missing or damaged.
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
    places: Any = _read_object(path / INDEX, begins_with_size=False)[0].get("weight_map")
    names = places.values() if isinstance(places, dict) else (None,)
    if not all(isinstance(name, str) and is_file_name(name) for name in names):
        raise ValueError(
            f"{path / INDEX}: expected a 'weight_map' from tensors to names of files in its folder"
        )
    files = {name: read_header(path / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise ValueError(f"{path / file}: expected tensor '{name}', as {INDEX} says, found none")
    return {name: files[file][name] for name, file in places.items()}


def is_file_name(name: str) -> bool:
    """Return True for the name of a file, not a path."""
    return name.isprintable() and os.path.basename(name) == name and name not in ("", ".", "..")
