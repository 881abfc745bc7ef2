"""The tensors of safetensors files: their offsets, reading a part of one, and the header of a new file.

    8 bytes: N | N bytes of JSON: {name: {dtype, shape, data_offsets}} | data, row-major, little-endian

A flat range of elements is one range of bytes. safetensors' own reader slices by dimension, and cannot
read a range that starts in the middle of a row; so the bytes are read directly.
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

from zeroshard.lazy.deferred import allocate
from zeroshard.plan.layout import Span

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

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor in a file."""

    file: Path
    offset: int
    """The number of bytes before its first element."""
    shape: tuple[int, ...]
    file_dtype: torch.dtype
    dtype: torch.dtype
    """The dtype of the tensors that `read` returns."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def cast(self, dtype: torch.dtype) -> FileTensor:
        """Return the same tensor, read as another dtype."""
        return replace(self, dtype=dtype)

    def read(self, span: Span) -> Tensor:
        """Return a range of the flattened tensor: [span.size], on the CPU.

        Raises:
            RuntimeError: the file ends too early.
        """
        size = self.file_dtype.itemsize
        raw = allocate(span.size * size)
        with self.file.open("rb") as file:
            file.seek(self.offset + span.start * size)
            num_read = file.readinto(raw.numpy().data)
        if num_read != raw.numel():
            raise RuntimeError(f"{self.file}: expected {raw.numel()} bytes of a tensor, got {num_read}")
        return raw.view(self.file_dtype).to(self.dtype)

    def __str__(self) -> str:
        """Return the same text on all ranks, whose copies of the file may be in other folders."""
        return f"in {self.file.name} at byte {self.offset} as {self.file_dtype}"


def find_tensors(folder: str | os.PathLike[str]) -> dict[str, FileTensor]:
    """Return the tensors of a checkpoint by name: of model.safetensors, or of the files in its index.

    Raises:
        ValueError: no such folder, or no safetensors checkpoint in it; a file that is missing or damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"expected a folder on this machine (nothing is downloaded), got '{folder}'")
    if (path / SINGLE).is_file():
        return _read_header(path / SINGLE)
    if not (path / INDEX).is_file():
        pickled = [file.name for file in path.glob("*.bin")]
        hint = f"; {pickled[0]} is a pickle, which could run code: convert it" if pickled else ""
        raise ValueError(f"'{folder}': expected {SINGLE} or {INDEX}, found neither{hint}")
    file_names = _read_index(path / INDEX)
    files = {name: _read_header(path / name) for name in sorted(set(file_names.values()))}
    for name, file in file_names.items():
        if name not in files[file]:
            raise ValueError(f"{path / file}: expected tensor '{name}', as {INDEX} says, found none")
    return {name: files[file][name] for name, file in file_names.items()}


def _read_index(file: Path) -> dict[str, str]:
    """Return the name of the file of each tensor, which is a file beside the index."""
    try:
        index = _parse(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror}") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ValueError(f"{file}: expected JSON with a 'weight_map' of names of tensors and files, got none")
    for name, place in places.items():
        if not isinstance(place, str) or not _is_file_name(place):
            raise ValueError(f"{file}: tensor '{name}': expected the name of a file beside it, got {place!r}")
    return places


def _is_file_name(name: str) -> bool:
    return name.isprintable() and os.path.basename(name) == name and name not in ("", ".", "..")


def _read_header(file: Path) -> dict[str, FileTensor]:
    try:
        with file.open("rb") as opened:
            header_size = int.from_bytes(opened.read(8), "little")
            if header_size > file.stat().st_size:
                raise ValueError(f"{file}: expected a safetensors file, got a header of {header_size} bytes")
            header = _parse(opened.read(header_size))
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: expected a safetensors file, got a header that is no JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(file, 8 + header_size, name, entry) for name, entry in header.items()}


def _parse(text: bytes) -> Any:
    """Return the value of a JSON text; None for another text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no UTF-8, no JSON, a number too long; or too deep
        return None


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
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Beginning:
    """The header of a file, and the offsets of its tensors."""

    header: bytes
    offsets: dict[str, int]
    """The offset of each tensor's first byte in the file."""
    num_bytes: int
    """The size of the whole file."""


def begin_file(tensors: Mapping[str, TensorInfo]) -> Beginning:
    """Lay out a file. Wide dtypes come first, so that all tensors are aligned.

    Raises:
        ValueError: a dtype that the format does not have.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"tensor '{name}' is {tensor.dtype}; safetensors: expected one of {', '.join(_DTYPES)}"
            )
        offsets[name], end = end, end + tensor.num_bytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    header = len(content).to_bytes(8, "little") + content
    return Beginning(
        header, {name: len(header) + start for name, start in offsets.items()}, len(header) + end
    )
