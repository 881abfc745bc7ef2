"""A stream of tensors becomes the safetensors files that transformers loads.

    model.safetensors                 if all tensors fit into one file; otherwise
    model-00001-of-0000N.safetensors  and
    model.safetensors.index.json      the file of each tensor

Files are written under temporary names and renamed when all are complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from zeroshard.checkpoint.files import make_folder, sync, write_synced
from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.config.rules import parse_dtype
from zeroshard.safetensors import INDEX, SINGLE, TensorInfo, begin_file

MAX_SHARD_BYTES = 5 * 10**9

ADAPTERS = "adapter_config.json"
"""The file that makes a folder one of adapters."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def check_folder(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Make the folder for some tensors.

    Raises:
        OSError: the folder can't be made or written to.
        RuntimeError: there is too little space.
        ValueError: the folder has adapters of peft.
    """
    make_folder(folder)
    if (folder / ADAPTERS).exists():
        raise ValueError(
            f"'{folder}' has adapters of peft ({ADAPTERS}), which transformers would load in place of the "
            "model: expected another folder"
        )
    needed = sum(tensor.num_bytes for tensor in tensors.values())
    if (free := shutil.disk_usage(folder).free) < needed:
        raise RuntimeError(f"{folder}: weights need {needed:,} bytes of free space; {free:,} bytes are free")


def write_weights(
    folder: Path, tensors: Mapping[str, TensorInfo], slices: Iterator[TensorSlice], max_shard_bytes: int
) -> None:
    """Write tensors, fsynced; the files of an earlier call are replaced.

    Args:
        folder: an existing folder.
        tensors: all tensors, by name.
        slices: their elements in the same order, in any dtype, on any device; no slice is empty.
        max_shard_bytes: the largest size of the tensors in a file; a larger tensor has a file of its own.

    Raises:
        OSError: a file could not be written.
    """
    shards = list(cut(tensors, max_shard_bytes))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE]
    try:
        for name, shard in zip(names, shards, strict=True):
            _write_file(_temporary(folder, name), {tensor: tensors[tensor] for tensor in shard}, slices)
        if len(names) > 1:
            home = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(tensor.num_bytes for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": home}
            names.append(INDEX)
            write_synced(_temporary(folder, INDEX), json.dumps(index, indent=2).encode())
        _appear(folder, names)
    except BaseException:
        for name in names:
            _temporary(folder, name).unlink(missing_ok=True)
        raise


def cut(tensors: Mapping[str, TensorInfo], max_bytes: int) -> Iterator[list[str]]:
    """Yield names in their order, in lists whose tensors have at most `max_bytes`, or of one tensor."""
    shard: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensor.num_bytes
    yield shard


def _write_file(file: Path, tensors: Mapping[str, TensorInfo], slices: Iterator[TensorSlice]) -> None:
    """Write the slices of one file; each is released before the next one is taken."""
    beginning = begin_file(tensors)
    try:
        with file.open("wb") as stream:
            left = beginning.num_bytes - stream.write(beginning.header)
            while left:
                left -= _write_slice(stream, tensors, beginning.offsets, next(slices))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(file)) from error


def _write_slice(
    stream: BinaryIO, tensors: Mapping[str, TensorInfo], offsets: Mapping[str, int], part: TensorSlice
) -> int:
    dtype = tensors[part.name].dtype
    stream.seek(offsets[part.name] + part.start * dtype.itemsize)
    return stream.write(part.data.to("cpu", dtype).view(torch.uint8).numpy().data)


def _appear(folder: Path, names: list[str]) -> None:
    """Rename the complete files. Until the last one is there the folder does not load."""
    for name in (SINGLE, INDEX):
        (folder / name).unlink(missing_ok=True)
    for name in names:
        os.replace(_temporary(folder, name), folder / name)
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in names:
            path.unlink()
    sync(folder)


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".{name}.tmp"


class Format:
    """Checked options of an export.

    Args:
        dtype: dtype of floating-point parameters, or its name; None: the main dtype.
        max_shard_bytes: the largest size of a file of weights.
        tokenizer: an object with `save_pretrained(folder)`, which is called after the model is written.

    Raises:
        ValueError: an option has another type or value.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype | str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        tokenizer: Any = None,
    ) -> None:
        if type(max_shard_bytes) is not int or max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes: expected an integer >= 1, got {max_shard_bytes!r}")
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise ValueError(f"tokenizer: expected an object with save_pretrained(), got {tokenizer!r:.80}")
        self.dtype = None if dtype is None else parse_dtype(dtype)
        self.max_shard_bytes = max_shard_bytes
        self._tokenizer = tokenizer

    def save_tokenizer(self, folder: Path) -> None:
        """Save the tokenizer, if there is one.

        Raises:
            RuntimeError: the tokenizer has failed to save itself.
        """
        if self._tokenizer is None:
            return
        try:
            self._tokenizer.save_pretrained(str(folder))
        except Exception as error:  # whatever it is: it must reach all ranks
            raise RuntimeError(f"{folder}: the tokenizer could not be saved: {error}") from error
