"""The parameters of a model that is being trained, streamed to all ranks unit by unit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.files import as_folder
from zeroshard.checkpoint.manifest import describe_model, saved_names
from zeroshard.checkpoint.tensors import TensorSlice, read_model
from zeroshard.comm.collectives import on_all, on_first
from zeroshard.config.checked import parse_dtype
from zeroshard.forwards.composed import is_wrapper
from zeroshard.forwards.quantized import dequantized, dequantized_form, has_codes, is_transposed, names_beside
from zeroshard.full.parameters import Named, spread, unsharded
from zeroshard.hf.adapters import Merging, export_adapters, has_adapters
from zeroshard.hf.export import (
    MAX_SHARD_BYTES,
    Export,
    Format,
    cast,
    export_engine,
    gather_buffers,
    info_of,
    join,
    own_parameters,
    whole_slice,
    write_all,
)
from zeroshard.plan.originals import is_packed
from zeroshard.safetensors import TensorInfo
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit

if TYPE_CHECKING:
    from zeroshard.engine import Engine


def save_pretrained(
    engine: Engine,
    dir: str | os.PathLike[str],
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge_adapters: bool = False,
    dequantize: bool = False,
) -> None:
    """Write the model as transformers does, for its `from_pretrained`; collective.

    Rank 0 writes, and holds one unit at a time. For a model with adapters of peft it writes the adapters,
    for `PeftModel.from_pretrained`, or with `merge_adapters` the model that has taken them in.

    Args:
        dir: a folder of rank 0, made if it is not there. Weights in it are replaced.
        tokenizer: a tokenizer to save, too; or None.
        dtype: the dtype of floating-point parameters; None: the main dtype.
        max_shard_bytes: the most bytes of a file of weights.
        merge_adapters: write the whole model, with the active adapters merged into its weights. The
            adapters of the engine stay as they are.
        dequantize: write the weights that codes stand for, as `merge_adapters` does too. A model with
            codes is written whole in no other way.

    Raises:
        ValueError: an argument is not as expected; adapters that are computed from more than parameters,
            or that no weight can take in; codes without adapters.
        RuntimeError: rank 0 could not write; all ranks tell the reason.
    """
    runtime = engine._runtime
    runtime.check_removals()
    how = Format(dtype=dtype, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer)
    if dequantize and not merge_adapters and has_adapters(engine.module):
        raise ValueError(
            "save_pretrained(dequantize=True): the model has adapters, which are written alone: expected "
            "merge_adapters=True with it"
        )
    runtime.wait()
    runtime.require_slices("save_pretrained()")
    if merge_adapters or dequantize:
        export_merged(runtime, dir, how, engine._parts.described)
    elif has_adapters(engine.module):
        export_adapters(runtime, dir, how)
    else:
        export_engine(runtime, dir, how, engine._parts.described)


def named_full_parameters(
    engine: Engine, dtype: torch.dtype | str | None = None, merge_adapters: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Stream the parameters, whole and on every rank: for an inference server, or the loop of an RL run.

    All ranks iterate together, to the end, and take no step meanwhile. A unit is gathered when its first
    parameter is asked for. The tensors of a unit share memory, which goes when the last of them is
    dropped: keep none of them, or a copy, to hold one unit at a time.

    Args:
        dtype: the dtype of floating-point tensors; None: the main dtype, or the dtype of a frozen parameter.
            Quantized weights come as numbers, not as codes.
        merge_adapters: merge the active adapters of peft into the weights around them, and give these the
            names that they have without adapters. The adapters of the engine stay as they are.

    Returns:
        An iterator over names and tensors of the original shapes, on this rank's device, with tied
        parameters once. They come in the order of the units, the first pipeline part's units first, and
        parameters of `Config.ignored` last, with this rank's own values.

    Raises:
        ValueError: an unknown dtype; adapters that no weight can take in.
        RuntimeError: in a forward, a backward or `unsharded()`.
    """
    chosen = None if dtype is None else parse_dtype(dtype)
    return _stream_parameters(engine._runtime, chosen, merge_adapters=merge_adapters)


def _stream_parameters(
    runtime: Runtime, dtype: torch.dtype | None, *, merge_adapters: bool
) -> Iterator[tuple[str, Tensor]]:
    runtime.wait()
    begun = runtime.state.num_changes
    _check_moment(runtime, begun)
    runtime.check_removals()
    return _stream(runtime, dtype, merging_of(runtime) if merge_adapters else None, begun)


def merging_of(runtime: Runtime) -> Merging | None:
    """The adapters of the model, to be merged; None if it has none. Collective.

    Raises:
        ValueError: an adapter that no weight can take in, on all ranks.
    """
    if not has_adapters(runtime.module):
        return None
    merging = Merging(runtime.module)

    def check() -> set[tuple[str, str]]:
        merging.check(runtime.ignored)
        return set() if runtime.context.axes.everyone.rank else _changes(runtime, merging)

    changes = set().union(*on_all(runtime.context.axes.world, "check of adapters", check))
    for fqn, num_changes in sorted(Counter(fqn for fqn, _ in changes).items()):
        if num_changes > 1:
            adapters = ", ".join(repr(change) for own, change in sorted(changes) if own == fqn and change)
            raise ValueError(
                f"merge_adapters: modules share '{fqn}', and adapters ({adapters}) change it for only some "
                "of them, or differently for each. Save the adapters without merge_adapters; or untie the "
                "weight before peft adds adapters: for a head model.config.tie_word_embeddings = False, "
                "then model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())"
            )
    return merging


def _changes(runtime: Runtime, merging: Merging) -> set[tuple[str, str]]:
    """How adapters change the parameters of this rank's part: a pair for each way in which one is used."""
    named = runtime.module.named_parameters(remove_duplicate=False)
    shown = {(getattr(p, "fqn", ""), merging.change_of(n)) for n, p in named if merging.rename(n) is not None}
    # A parameter that this part writes for other parts, too, and of which it shows only a copy.
    hidden = {sharded.fqn for sharded in own_parameters(runtime)} - {fqn for fqn, _ in shown}
    return shown | {(fqn, "modules_to_save") for fqn in hidden}


def _check_moment(runtime: Runtime, begun: int) -> None:
    """Refuse to gather in a moment in which the module has other parameters than when the stream began.

    Raises:
        RuntimeError: they have changed, or others stand in for them.
    """
    runtime.wait()
    if runtime.state.num_changes != begun:
        raise RuntimeError(
            "named_full_parameters(): parameters have changed since the stream began, which would mix old "
            "and new ones: expected no step, no load, no begin and no end of EMA.applied() before its end. "
            "Begin another stream"
        )
    runtime.check_slots()
    runtime.require_slices("named_full_parameters()")


def _stream(
    runtime: Runtime, dtype: torch.dtype | None, merging: Merging | None, begun: int
) -> Iterator[tuple[str, Tensor]]:
    pp, names = runtime.context.axes.pp, _names(runtime, merging)
    own = _steps(runtime, names, merging)
    counts = [len(own)] if pp.size == 1 else pp.all_gather_object(len(own), "number of units of all parts")
    for part, count in enumerate(counts):
        for number in range(count):
            _check_moment(runtime, begun)
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
        if known := _renamed((sharded.fqn, *aliases.get(sharded.fqn, ())), merging):
            names[sharded.fqn] = known[0]
    return names


class Streamed(NamedTuple):
    """A tensor of the stream, before it is gathered."""

    info: TensorInfo
    names: list[str]
    """All names of the parameter, the first one first; without adapters, if these are merged."""


def streamed_tensors(runtime: Runtime, merging: Merging | None) -> dict[str, Streamed]:
    """Return the tensors that this rank's part of the model adds to the stream, by name, in their order."""
    names, aliases = _names(runtime, merging), read_model(runtime).aliases
    found = {}
    for buffer in (buffer for unit in runtime.units for buffer in unit.buffers):
        for original, shape in zip(buffer.originals, buffer.whole_shapes, strict=True):
            if original.fqn not in names:
                continue
            info = TensorInfo(buffer.plan.main_dtype, tuple(shape))
            if is_packed(original.parameter):
                owner, _ = original.owners[0]
                dtype, form = dequantized_form(owner, info.dtype, info.shape)
                info = TensorInfo(dtype, form[::-1] if is_transposed(owner) else form)
            every = (original.fqn, *aliases.get(original.fqn, ()))
            found[names[original.fqn]] = Streamed(info, _renamed(every, merging))
    for name, (owner, parameter, known) in _ignored(runtime, merging).items():
        dtype, form = dequantized_form(owner, parameter.dtype, tuple(parameter.shape))
        is_turned = is_packed(parameter) and is_transposed(owner)
        found[name] = Streamed(TensorInfo(dtype, form[::-1] if is_turned else form), known)
    return found


def _renamed(names: Iterable[str], merging: Merging | None) -> list[str]:
    """The names without adapters; names of adapters are left out."""
    known = (name if merging is None else merging.rename(name) for name in names)
    return [name for name in known if name is not None]


def _ignored(
    runtime: Runtime, merging: Merging | None
) -> dict[str, tuple[nn.Module, nn.Parameter, list[str]]]:
    """The parameters that are not sharded, by first name in the stream: a module of each, and all names."""
    owners = {p: module for module in runtime.module.modules() for p in module._parameters.values()}
    names: dict[nn.Parameter, list[str]] = {parameter: [] for parameter in runtime.ignored}
    for fqn, parameter in runtime.module.named_parameters(remove_duplicate=False):
        if parameter in names:
            names[parameter] += _renamed([fqn], merging)
    return {known[0]: (owners[p], p, known) for p, known in names.items() if known}


_Step = Callable[[], dict[str, Tensor]]
"""Gathers some parameters, by their names in the stream; collective in the part of the model."""


def _steps(runtime: Runtime, names: Mapping[str, str], merging: Merging | None) -> list[_Step]:
    """The steps in which this rank's part of the model is gathered: a unit each, and what is not sharded."""
    steps: list[_Step] = []
    for unit in runtime.units:
        if any(sharded.fqn in names for buffer in unit.buffers for sharded in buffer.sharded):
            layers = [] if merging is None else merging.layers_of(unit.slots.owners)
            steps.append(_merger(runtime, unit, names, layers) if layers else _gatherer(runtime, unit, names))
    if own := _ignored(runtime, merging):
        steps.append(lambda: {name: _as_it_is(owner, p) for name, (owner, p, _) in own.items()})
    return steps


def _as_it_is(owner: nn.Module, parameter: nn.Parameter) -> Tensor:
    """A copy of a parameter that is not sharded; numbers for codes, and for a tensor that wraps others."""
    values = parameter.detach()
    if is_packed(parameter):
        return _as_plain(owner, dequantized(owner, values))
    return values.dequantize() if is_wrapper(values) else values.clone()


def _gatherer(runtime: Runtime, unit: Unit, names: Mapping[str, str]) -> _Step:
    def gather() -> dict[str, Tensor]:
        found = {}
        for buffer in unit.buffers:
            wholes = buffer.gather_wholes()
            for original, values in zip(buffer.originals, wholes, strict=True):
                if original.fqn in names:
                    owner, _ = original.owners[0]
                    if is_packed(original.parameter):
                        values = _as_plain(owner, dequantized(owner, values))
                    found[names[original.fqn]] = values
        return found

    return gather


def _as_plain(owner: nn.Module, values: Tensor) -> Tensor:
    """A weight with the dimensions that it has in a model that is not quantized."""
    return values.t().contiguous() if is_transposed(owner) else values


def _merger(runtime: Runtime, unit: Unit, names: Mapping[str, str], layers: list[Any]) -> _Step:
    """A step that lets peft merge into the full parameters of a unit, which are then forgotten."""

    def merge() -> dict[str, Tensor]:
        found = {}
        of_codes = {base: layer for layer in layers if has_codes(base := layer.get_base_layer())}
        plain = [layer for layer in layers if layer.get_base_layer() not in of_codes]
        with unsharded(runtime, layers, write_back=False), Merging.merged(plain):
            for original in (original for buffer in unit.buffers for original in buffer.originals):
                owner, attribute = original.owners[0]
                shown = owner._parameters[attribute]
                assert shown is not None, "it is sharded"
                if original.fqn in names:
                    values = shown.detach()
                    if is_packed(original.parameter):  # peft would quantize the sum again
                        values = dequantized(owner, values)
                        if owner in of_codes:
                            Merging.add_to_weight(of_codes[owner], values, original.fqn)
                        values = _as_plain(owner, values)
                    elif owner in of_codes and attribute == "bias":
                        values = values.clone()
                        Merging.add_to_bias(of_codes[owner], values)
                    found[names[original.fqn]] = values
        return found

    return merge


def export_merged(runtime: Runtime, dir: object, how: Format, described: Mapping[str, Any] | None) -> None:
    """Write the model with its adapters merged and its codes as numbers; collective.

    Rank 0 writes. All ranks hold one unit at a time, as in `named_full_parameters`.

    Args:
        runtime: of the model.
        dir: the folder, as rank 0 was given it.
        how: dtype and size of files.
        described: the description of the whole model, where pipeline ranks have parts of it.

    Raises:
        ValueError: an adapter that no weight can take in, on all ranks.
        ValueError, RuntimeError: rank 0 could not write, on all ranks.
    """
    axes = runtime.context.axes
    merging = merging_of(runtime)
    folder = on_first(axes.world, "start of an export", lambda: as_folder(dir))
    own, buffers = _plan(runtime, merging, how.dtype, _plainly(runtime.module, described))
    weights, before = join(axes, own)

    def slices() -> Iterator[TensorSlice]:
        """Whole tensors on rank 0, parameters first; nothing on other ranks."""
        for name, values in _stream_parameters(runtime, None, merge_adapters=True):
            for saved in weights.names[name] if axes.world.rank == 0 and values.numel() else ():
                yield whole_slice(Named(saved, values))
            del values  # before the next unit is gathered
        yield from gather_buffers(axes, buffers, before)

    write_all(axes.world, folder, weights, slices(), how)


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
) -> tuple[Export, dict[str, Tensor]]:
    """Return the weights of this rank's part of the model, and its buffers by their names in the files."""
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
    return Export(model, parameters, {n: info_of(b) for n, b in buffers.items()}, names), buffers
