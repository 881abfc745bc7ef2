"""A model without adapters and codes in the layout of transformers, from the engine that trains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.description import describe_model, saved_names
from zeroshard.checkpoint.files import as_folder
from zeroshard.checkpoint.tensors import TensorSlice, read_model
from zeroshard.comm.agreed import on_first
from zeroshard.forwards.quantized import names_beside
from zeroshard.full.parts import Named, collect
from zeroshard.hf.export import Weights, cast, info_of, join, whole_slice, write_all
from zeroshard.hf.format import Format
from zeroshard.hf.live import merging_of, stream_parameters, streamed_tensors
from zeroshard.hf.merging import Merging
from zeroshard.safetensors import TensorInfo
from zeroshard.sharding.runtime import Runtime


@dataclass(frozen=True, slots=True)
class _Part:
    """The contents of the files that come from this rank's part of the model."""

    weights: Weights
    names: dict[str, list[str]]
    """By name in the stream, the names of a parameter in the files."""
    buffers: dict[str, Tensor]
    """By name in the files."""


def export_merged(
    runtime: Runtime, dir: object, how: Format, described: Mapping[str, Any] | None = None
) -> None:
    """Write the model with its adapters merged and its codes as numbers; collective.

    Rank 0 writes. All ranks hold one unit at a time, as in `stream_parameters`.

    Args:
        runtime: of the model.
        dir: the folder, as rank 0 was given it.
        how: dtype and size of files.
        described: the description of the whole model, where pipeline ranks have parts of it.

    Raises:
        ValueError: an adapter that no weight can take in, on all ranks.
        ValueError, RuntimeError: rank 0 could not write, on all ranks.
    """
    runtime.settle()
    runtime.require_slices("save_pretrained()")
    axes = runtime.context.axes
    merging = merging_of(runtime)
    folder = on_first(axes.world, "start of an export", lambda: as_folder(dir))
    part = _plan(runtime, merging, how.dtype, _plainly(runtime.module, described))
    weights, before = join(axes, part.weights)
    names = _join_names(runtime, part.names)
    write_all(axes.world, folder, weights, _slices(runtime, part, names, before), how)


def _plainly(module: Any, described: Mapping[str, Any] | None) -> dict[str, Any]:
    """The description of a model as it is without adapters and codes."""
    model = dict(described or describe_model(module))
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    model["class"] = type(base).__name__
    model.pop("adapters", None)
    if "config" in model:
        model["config"] = {
            key: value for key, value in model["config"].items() if key != "quantization_config"
        }
        model["config"]["architectures"] = [model["class"]]
    return model


def _plan(
    runtime: Runtime, merging: Merging | None, dtype: torch.dtype | None, model: Mapping[str, Any]
) -> _Part:
    names: dict[str, list[str]] = {}
    parameters: dict[str, TensorInfo] = {}
    for name, streamed in streamed_tensors(runtime, merging).items():
        names[name] = saved_names(model, streamed.names)
        parameters |= dict.fromkeys(names[name], cast(streamed.info, dtype))
    left_out = {*model.get("not_saved", ()), *names_beside(runtime.module)}
    buffers = {}
    for name, buffer in read_model(runtime).buffers.items():
        plain = name if merging is None else merging.rename(name)
        if plain is not None and not left_out & {name, plain}:
            buffers[plain] = buffer
    return _Part(Weights(model, parameters, {n: info_of(b) for n, b in buffers.items()}), names, buffers)


def _join_names(runtime: Runtime, own: dict[str, list[str]]) -> dict[str, list[str]]:
    pp = runtime.context.axes.pp
    parts = [own] if pp.size == 1 else pp.all_gather_object(own, "names of all parts")
    return {name: saved for part in parts for name, saved in part.items()}


def _slices(
    runtime: Runtime, part: _Part, names: Mapping[str, list[str]], before: set[str]
) -> Iterator[TensorSlice]:
    """Yield whole tensors on rank 0, parameters first; nothing on other ranks."""
    axes = runtime.context.axes
    for name, values in stream_parameters(runtime, None, merge_adapters=True):
        for saved in names[name] if axes.world.rank == 0 and values.numel() else ():
            yield whole_slice(Named(saved, values))
        del values  # before the next unit is gathered
    is_first = axes.everyone.rank == 0
    own = (
        Named(name, b) for name, b in part.buffers.items() if is_first and name not in before and b.numel()
    )
    yield from map(whole_slice, collect(axes, own))
