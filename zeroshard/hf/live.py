"""The parameters of a model that is being trained, streamed to all ranks unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.tensors import read_model
from zeroshard.forwards.quantized import dequantized, is_quantized
from zeroshard.full.parameters import unsharded
from zeroshard.full.parts import spread
from zeroshard.hf.adapters import has_adapters
from zeroshard.hf.export import own_parameters
from zeroshard.hf.merging import Merging
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.sharding.wholes import gather_wholes


def stream_parameters(
    runtime: Runtime, dtype: torch.dtype | None, *, merge_adapters: bool
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over names and whole parameters; arguments as `named_full_parameters` has them."""
    _check_moment(runtime)
    merging = Merging(runtime.module) if merge_adapters and has_adapters(runtime.module) else None
    return _stream(runtime, dtype, merging)


def _check_moment(runtime: Runtime) -> None:
    runtime.settle()
    runtime.check_slots()
    runtime.require_slices("named_full_parameters()")


def _stream(
    runtime: Runtime, dtype: torch.dtype | None, merging: Merging | None
) -> Iterator[tuple[str, Tensor]]:
    pp, names = runtime.context.axes.pp, _names(runtime, merging)
    own = _steps(runtime, names, merging)
    counts = [len(own)] if pp.size == 1 else pp.all_gather_object(len(own), "number of units of all parts")
    for part, count in enumerate(counts):
        for number in range(count):
            _check_moment(runtime)
            found = spread(runtime.context.axes, part, own[number]() if part == pp.rank else None)
            while found:
                name = next(iter(found))
                values = found.pop(name)
                yield name, values.to(dtype) if dtype and values.is_floating_point() else values
                del values  # before the next unit is gathered


def _names(runtime: Runtime, merging: Merging | None) -> dict[str, str]:
    """The name in the stream of each parameter that this rank's part writes, by its own name."""
    aliases = read_model(runtime).aliases
    names = {}
    for sharded in own_parameters(runtime):
        name: str | None = sharded.fqn
        if merging is not None:
            known = (merging.rename(one) for one in (sharded.fqn, *aliases.get(sharded.fqn, ())))
            name = next((one for one in known if one is not None), None)
        if name is not None:
            names[sharded.fqn] = name
    return names


_Step = Callable[[], dict[str, Tensor]]
"""Gathers some parameters, by their names in the stream; collective in the part of the model."""


def _steps(runtime: Runtime, names: Mapping[str, str], merging: Merging | None) -> list[_Step]:
    """The steps in which this rank's part of the model is gathered: a unit each, and what is not sharded."""
    steps: list[_Step] = []
    for unit in runtime.units:
        if any(sharded.fqn in names for buffer in unit.buffers for sharded in buffer.sharded):
            layers = [] if merging is None else merging.layers_of(unit.slots.owners)
            steps.append(_merger(runtime, unit, names, layers) if layers else _gatherer(runtime, unit, names))
    ignored = {} if merging is None else {name: merging.rename(name) for name in runtime.ignored.values()}
    own = {name: p for p, fqn in runtime.ignored.items() if (name := ignored.get(fqn, fqn)) is not None}
    if own:
        steps.append(lambda: {name: p.detach().clone() for name, p in own.items()})
    return steps


def _gatherer(runtime: Runtime, unit: Unit, names: Mapping[str, str]) -> _Step:
    def gather() -> dict[str, Tensor]:
        found = {}
        for buffer in unit.buffers:
            wholes = gather_wholes(buffer, runtime.context.axes.tp)
            for original, values in zip(buffer.originals, wholes, strict=True):
                if original.fqn in names:
                    owner, _ = original.owners[0]
                    found[names[original.fqn]] = dequantized(owner, values) if original.is_packed else values
        return found

    return gather


def _merger(runtime: Runtime, unit: Unit, names: Mapping[str, str], layers: list[Any]) -> _Step:
    """A step that lets peft merge into the full parameters of a unit, which are then forgotten."""

    def merge() -> dict[str, Tensor]:
        found = {}
        of_codes = {base: layer for layer in layers if is_quantized(base := layer.get_base_layer())}
        plain = [layer for layer in layers if layer.get_base_layer() not in of_codes]
        with unsharded(runtime, layers, write_back=False), Merging.merged(plain):
            for original in (original for buffer in unit.buffers for original in buffer.originals):
                owner, attribute = original.owners[0]
                shown = owner._parameters[attribute]
                assert shown is not None, "it is sharded"
                if original.fqn in names:
                    values = shown.detach()
                    if original.is_packed:  # peft would quantize the sum again
                        values = dequantized(owner, values)
                        if owner in of_codes:
                            values += Merging.delta_of(of_codes[owner], original.fqn)
                    found[names[original.fqn]] = values
        return found

    return merge
