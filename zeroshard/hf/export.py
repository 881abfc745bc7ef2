"""A model in the layout of transformers: from a checkpoint on disk, or from the engine that trains it.

A stream of tensors becomes the safetensors files that transformers loads:

    model.safetensors                 if all tensors fit into one file; otherwise
    model-00001-of-0000N.safetensors  and
    model.safetensors.index.json      the file of each tensor

Files are written under temporary names and renamed when all are complete.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.files import make_folder, naming, sync, write_synced
from zeroshard.checkpoint.manifest import check_sums, saved_names
from zeroshard.checkpoint.places import StoredTensor
from zeroshard.checkpoint.tensors import (
    MAX_BOX_BYTES,
    Stored,
    TensorReader,
    TensorSlice,
    is_beside_codes,
    open_checkpoint,
)
from zeroshard.codec import dtype_name
from zeroshard.config.checked import parse_dtype
from zeroshard.safetensors import INDEX, SINGLE, TensorInfo, begin_file

MAX_SHARD_BYTES = 5 * 10**9

ADAPTERS = "adapter_config.json"
"""The file that makes a folder one of adapters."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def check_folder(folder: Path) -> None:
    """Make the folder for a model.

    Raises:
        OSError: the folder can't be made or written to.
        ValueError: the folder has adapters of peft.
    """
    make_folder(folder)
    if (folder / ADAPTERS).exists():
        raise ValueError(
            f"'{folder}' has adapters of peft ({ADAPTERS}), which transformers would load in place of the "
            "model: expected another folder"
        )


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
    with naming(file), file.open("wb") as stream:
        left = beginning.num_bytes - stream.write(beginning.header)
        while left:
            part = next(slices)
            dtype = tensors[part.name].dtype
            stream.seek(beginning.offsets[part.name] + part.start * dtype.itemsize)
            left -= stream.write(part.data.to("cpu", dtype).view(torch.uint8).numpy().data)
            del part
        stream.flush()
        os.fsync(stream.fileno())


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


@dataclass(slots=True)
class Format:
    """Options of an export."""

    dtype: Any = None
    """The dtype of floating-point parameters, or its name; None: the main dtype."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """The largest size of a file of weights."""
    tokenizer: Any = None
    """An object with `save_pretrained(folder)`, which is called after the model is written."""

    def __post_init__(self) -> None:
        self.dtype = None if self.dtype is None else parse_dtype(self.dtype)
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes: expected at least 1, got {self.max_shard_bytes}")

    def save_tokenizer(self, folder: Path) -> None:
        """Save the tokenizer, if there is one."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(folder))


@dataclass(frozen=True, slots=True)
class Export:
    """The weights to write, in the order of their slices: parameters, then buffers."""

    model: Mapping[str, Any]
    """The description that `describe_model` makes."""
    parameters: dict[str, TensorInfo]
    buffers: dict[str, TensorInfo]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.parameters | self.buffers

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that holds the values of all parameters."""
        dtypes = [t.dtype for t in self.parameters.values() if t.dtype.is_floating_point]
        return reduce(torch.promote_types, dtypes) if dtypes else None


def write_model(folder: Path, weights: Export, slices: Iterator[TensorSlice], how: Format) -> None:
    """Write a folder for transformers' `from_pretrained`; one process.

    Args:
        folder: an existing folder.
        weights: the weights, and the description of their model.
        slices: their elements, in the same order.
        how: dtype and size of files.
    """
    write_weights(folder, weights.tensors, slices, how.max_shard_bytes)
    if "config" in weights.model:
        config = dict(weights.model["config"])
        if weights.dtype is not None:
            config["dtype"] = dtype_name(weights.dtype)
        if (tied := weights.model.get("tied", {}).keys()) and tied <= weights.parameters.keys():
            config["tie_word_embeddings"] = False  # the file has both: they were untied
        _write_json(folder / "config.json", config)
    if "generation_config" in weights.model:
        _write_json(folder / "generation_config.json", weights.model["generation_config"])
    how.save_tokenizer(folder)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    write_synced(file, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


# --------------------------------------------------------------------------------- a checkpoint on disk


def export_checkpoint(directory: Path, folder: Path, how: Format, *, verify: bool = True) -> None:
    """Write the model that a checkpoint holds. One process, no GPU, a few megabytes of memory.

    Args:
        directory: the directory of the checkpoint.
        folder: the output; made if it is not there. Weights in it are replaced.
        how: dtype and size of files.
        verify: compare checksums of all files first.

    Raises:
        ValueError: the checkpoint is of a model with adapters, or has no frozen parameters.
        RuntimeError: the checkpoint is damaged.
        OSError: a file can't be written.
    """
    stored = open_checkpoint(directory)
    manifest = stored.manifest
    beside = filter(is_beside_codes, manifest.buffers)
    kept = (name for name in manifest.parameters if name not in manifest.frozen)
    codes = (name for name in kept if not stored.tensors[name].dtype.is_floating_point)
    for found, reason in (
        (manifest.frozen, f"leaves out {len(manifest.frozen)} frozen parameters"),
        (manifest.model.get("adapters"), "has adapters of peft"),
        (list(chain(beside, codes)), "has weights as codes"),
    ):
        if found:
            raise ValueError(
                f"'{directory}' {reason}, such as '{next(iter(found))}': load it into an engine of its "
                "model, and call engine.save_pretrained(), with dequantize=True for codes"
            )
    if verify:
        check_sums(directory, manifest, manifest.files)
    sources = {
        name: first
        for first, record in manifest.parameters.items()
        for name in saved_names(manifest.model, (first, *record.aliases))
    }
    not_saved = manifest.model.get("not_saved", ())
    weights = Export(
        manifest.model,
        {name: in_dtype(stored.tensors[first], how.dtype) for name, first in sources.items()},
        {name: info_of(stored.tensors[name]) for name in manifest.buffers if name not in not_saved},
    )
    check_folder(folder)
    write_model(folder, weights, _read(stored, weights.tensors, sources), how)


def _read(
    stored: Stored, tensors: Mapping[str, TensorInfo], sources: Mapping[str, str]
) -> Iterator[TensorSlice]:
    """Yield pieces of tensors; the next piece overwrites the memory of the last one."""
    memory = torch.empty(MAX_BOX_BYTES, dtype=torch.uint8, device="cpu")
    with TensorReader(stored) as reader:
        for name, tensor in tensors.items():
            source, step = sources.get(name, name), MAX_BOX_BYTES // tensor.dtype.itemsize
            numel = math.prod(tensor.shape)
            for start in range(0, numel, step):
                data = memory.view(tensor.dtype)[: min(step, numel - start)]
                reader.read(TensorSlice(source, tensor.shape, start, data))
                yield TensorSlice(name, tensor.shape, start, data)


def info_of(tensor: Tensor | StoredTensor) -> TensorInfo:
    """The dtype and shape of a tensor."""
    return TensorInfo(tensor.dtype, tuple(tensor.shape))


def in_dtype(tensor: TensorInfo | StoredTensor, dtype: torch.dtype | None) -> TensorInfo:
    """The dtype and shape of a tensor in a file; `dtype` counts for floating-point tensors alone."""
    return TensorInfo(dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype, tensor.shape)
