"""The parameters of a model that is being trained, streamed to all ranks unit by unit."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.files import as_folder
from zeroshard.checkpoint.manifest import describe_model, saved_names
from zeroshard.checkpoint.tensors import TensorSlice, read_model
from zeroshard.comm.collectives import on_all, on_first
from zeroshard.config.checked import parse_dtype
from zeroshard.forwards.quantized import (
    dequantized,
    dequantized_form,
    is_quantized,
    is_transposed,
    is_wrapper,
    names_beside,
)
from zeroshard.full.parameters import Whole, stream, unsharded, wholes_of
from zeroshard.hf.adapters import Merging, export_adapters, has_adapters
from zeroshard.hf.export import MAX_SHARD_BYTES, Export, Format, check_folder, in_dtype, info_of, write_model
from zeroshard.parameters.state import Moment
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
    how = Format(dtype, max_shard_bytes, tokenizer)
    if dequantize and not merge_adapters and has_adapters(engine.module):
        raise ValueError(
            "save_pretrained(dequantize=True): the model has adapters, which are written alone: expected "
            "merge_adapters=True with it"
        )
    runtime.wait("save_pretrained()", Moment.FAILED, Moment.SHOWN)
    if has_adapters(engine.module) and not merge_adapters:
        export_adapters(runtime, dir, how)
    else:
        _export(runtime, dir, how, engine._parts.described, as_numbers=merge_adapters or dequantize)


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
    runtime = engine._runtime
    runtime.wait()
    _check_moment(runtime, runtime.state.num_changes)
    runtime.check_removals()
    return _stream(runtime, chosen, merging_of(runtime) if merge_adapters else None, to_all=True)


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
    hidden = {whole.original.fqn for whole in _written(runtime)} - {fqn for fqn, _ in shown}
    return shown | {(fqn, "modules_to_save") for fqn in hidden}


def _check_moment(runtime: Runtime, begun: int) -> None:
    """Refuse to gather in a moment in which the module has other parameters than when the stream began.

    Raises:
        RuntimeError: they have changed, or others stand in for them.
    """
    runtime.wait("named_full_parameters()", Moment.FAILED, Moment.SHOWN)
    if runtime.state.num_changes != begun:
        raise RuntimeError(
            "named_full_parameters(): parameters have changed since the stream began, which would mix old "
            "and new ones: expected no step, no load, no begin and no end of EMA.applied() before its end. "
            "Begin another stream"
        )
    runtime.check_slots()


def _stream(
    runtime: Runtime, dtype: torch.dtype | None, merging: Merging | None, *, to_all: bool
) -> Iterator[tuple[str, Tensor]]:
    check = partial(_check_moment, runtime, runtime.state.num_changes)
    reads = _reads(runtime, _streamed(runtime, merging), merging)

    def as_asked(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, values = named
        return name, values.to(dtype) if dtype and values.is_floating_point() else values

    # map, unlike a loop, does not hold the last tensor while the next unit is gathered.
    return map(as_asked, stream(runtime.context.axes, reads, to_all=to_all, check=check))


def _written(runtime: Runtime) -> Iterator[Whole]:
    """The parameters that this rank's part of the model writes; the first one, if several parts hold one."""
    axes = runtime.context.axes
    for whole in wholes_of(axes, runtime.buffers):
        if axes.pp.rank in whole.original.holders[:1] or not whole.original.holders:
            yield whole


class _Streamed(NamedTuple):
    """A parameter of the stream, before it is read."""

    names: list[str]
    """All of its names, without adapters that are merged. It has the first one in the stream."""
    owner: nn.Module
    info: TensorInfo


def _streamed(runtime: Runtime, merging: Merging | None) -> dict[str, _Streamed]:
    """The parameters that this rank's part of the model adds to the stream, by their own names, in order."""
    aliases, found = read_model(runtime).aliases, dict[str, _Streamed]()

    def add(
        fqn: str, names: Sequence[str], parameter: nn.Parameter, owner: nn.Module, info: TensorInfo
    ) -> None:
        if known := _renamed(names, merging):
            if is_packed(parameter) or is_wrapper(parameter):
                dtype, shape = dequantized_form(owner, info.dtype, info.shape)
                info = TensorInfo(dtype, shape[::-1] if is_transposed(owner) else shape)
            found[fqn] = _Streamed(known, owner, info)

    for whole in _written(runtime):
        original = whole.original
        info = TensorInfo(whole.buffer.plan.main_dtype, tuple(whole.sharded.full_shape))
        names = original.fqn, *aliases.get(original.fqn, ())
        add(original.fqn, names, original.parameter, original.owners[0][0], info)
    owners = {p: module for module in runtime.module.modules() for p in module._parameters.values()}
    named = [*runtime.module.named_parameters(remove_duplicate=False)]
    for parameter, fqn in runtime.ignored.items():
        names = tuple(name for name, other in named if other is parameter)
        add(fqn, names, parameter, owners[parameter], info_of(parameter))
    return found


def _renamed(names: Iterable[str], merging: Merging | None) -> list[str]:
    """The names without adapters; names of adapters are left out."""
    known = (name if merging is None else merging.rename(name) for name in names)
    return [name for name in known if name is not None]


def _reads(
    runtime: Runtime, streamed: Mapping[str, _Streamed], merging: Merging | None
) -> list[Callable[[], dict[str, Tensor]]]:
    """The reads of this rank's part of the model: a unit each, and what is not sharded."""
    reads: list[Callable[[], dict[str, Tensor]]] = []
    for unit in runtime.units:
        if any(sharded.fqn in streamed for buffer in unit.buffers for sharded in buffer.sharded):
            layers = [] if merging is None else merging.layers_of(unit.slots.owners)
            reads.append(partial(_read, runtime, unit, streamed, layers))
    own = [(streamed[fqn], parameter) for parameter, fqn in runtime.ignored.items() if fqn in streamed]
    return [*reads, lambda: {one.names[0]: _as_it_is(one.owner, parameter) for one, parameter in own}]


def _as_it_is(owner: nn.Module, parameter: nn.Parameter) -> Tensor:
    """A copy of a parameter that is not sharded; numbers for codes, and for a tensor that wraps others."""
    values = parameter.detach()
    if is_packed(parameter):
        return _as_plain(owner, dequantized(owner, values))
    return values.dequantize() if is_wrapper(values) else values.clone()


def _read(
    runtime: Runtime, unit: Unit, streamed: Mapping[str, _Streamed], layers: Sequence[Any]
) -> dict[str, Tensor]:
    """Gather the parameters of a unit, by their names in the stream.

    Args:
        runtime: the runtime of the unit.
        unit: the unit.
        streamed: the parameters to return.
        layers: layers with adapters. peft merges into full parameters, which are then dropped.
    """
    found = {}
    of_codes = {base: layer for layer in layers if is_quantized(base := layer.get_base_layer())}
    with ExitStack() as stack:
        if layers:
            stack.enter_context(unsharded(runtime, layers, write_back=False))
            stack.enter_context(
                Merging.merged([one for one in layers if one.get_base_layer() not in of_codes])
            )
        for buffer in unit.buffers:
            places = [original.owners[0] for original in buffer.originals]
            shown = [owner._parameters[attribute] for owner, attribute in places]
            wholes = [cast(Tensor, one).detach() for one in shown] if layers else buffer.gather_wholes()
            for original, (owner, _), values in zip(buffer.originals, places, wholes, strict=True):
                if original.fqn not in streamed:
                    continue
                if is_packed(original.parameter):
                    values = dequantized(owner, values)  # peft would quantize the sum again
                    Merging.add_to_weight(of_codes.get(owner), values)
                    values = _as_plain(owner, values)
                found[streamed[original.fqn].names[0]] = values
    return found


def _as_plain(owner: nn.Module, values: Tensor) -> Tensor:
    """A weight with the dimensions that it has in a model that is not quantized."""
    return values.t().contiguous() if is_transposed(owner) else values


def _export(
    runtime: Runtime, dir: object, how: Format, described: Mapping[str, Any] | None, *, as_numbers: bool
) -> None:
    """Write the model with its adapters merged; collective.

    Rank 0 writes. All ranks hold one unit at a time, as in `named_full_parameters`.

    Args:
        runtime: of the model.
        dir: the folder, as rank 0 was given it.
        how: dtype and size of files.
        described: the description of the whole model, where pipeline ranks have parts of it.
        as_numbers: False refuses codes.

    Raises:
        ValueError: weights are codes, or an adapter that no weight can take in, on all ranks.
        ValueError, RuntimeError: rank 0 could not write, on all ranks.
    """
    axes, label = runtime.context.axes, "start of an export"
    on_all(axes.world, label, lambda: runtime.check_slots() if as_numbers else _refuse_codes(runtime))
    merging = merging_of(runtime)
    folder = on_first(axes.world, label, lambda: as_folder(dir))
    model = _plainly(runtime.module, described) if as_numbers else described or describe_model(runtime.module)
    streamed = _streamed(runtime, merging).values()
    left_out = {*model.get("not_saved", ()), *names_beside(runtime.module)}
    own = {
        plain: buffer
        for name, buffer in read_model(runtime).buffers.items()
        if (plain := next(iter(_renamed([name], merging)), None)) and not left_out & {name, plain}
    }
    weights, saved = Export(model, {}, {}), dict[str, list[str]]()
    mine = [(one.names, one.info) for one in streamed], {name: info_of(value) for name, value in own.items()}
    for parameters, buffers in axes.pp.all_gather_object(mine, label):
        for names, info in parameters:
            saved[names[0]] = saved_names(model, names)
            weights.parameters.update(dict.fromkeys(saved[names[0]], in_dtype(info, how.dtype)))
        weights.buffers.update({name: info for name, info in buffers.items() if name not in saved})
        saved |= {name: [name] for name in buffers}
    on_first(axes.world, label, lambda: check_folder(folder))

    def slices() -> Iterator[TensorSlice]:
        """Whole tensors on rank 0, parameters first; nothing on other ranks."""
        others = stream(axes, [lambda: own], to_all=False)
        for name, values in chain(_stream(runtime, None, merging, to_all=False), others):
            for each in saved.pop(name, ()) if values.numel() else ():
                yield TensorSlice(each, tuple(values.shape), 0, values.reshape(-1))
            del values  # before the next unit is gathered

    gathered = slices()

    def write() -> None:
        try:
            if axes.world.rank == 0:
                write_model(folder, weights, gathered, how)
        finally:
            deque(gathered, 0)  # the ranks gather together, even if the writing has failed

    on_all(axes.world, "end of an export", write)


def _refuse_codes(runtime: Runtime) -> None:
    """Refuse codes: the layout of transformers would need the config of their quantization."""
    packed = (p.fqn for buffer in runtime.buffers if buffer.plan.is_packed for p in buffer.sharded)
    ignored = (name for p, name in runtime.ignored.items() if is_packed(p) or is_wrapper(p))
    if (name := next(chain(packed, ignored), None)) is not None:
        raise ValueError(
            f"save_pretrained(): '{name}' holds codes of a quantized weight: expected a model that is not "
            "quantized, or one with adapters, which are saved alone; or dequantize=True, which writes the "
            "weights that codes stand for"
        )


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
