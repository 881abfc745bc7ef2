"""A module becomes units and a runtime, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm import streams
from zeroshard.comm.collectives import Axis
from zeroshard.comm.device import use_device
from zeroshard.comm.lifecycle import watch
from zeroshard.comm.mesh import Axes, build_mesh, open_axes, open_world
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.streams import Streams
from zeroshard.comm.wrappers import refuse_wrappers
from zeroshard.config.sections import Config, refuse_pipeline
from zeroshard.forwards.activations import offload_activations
from zeroshard.forwards.budget import Budget
from zeroshard.forwards.lean import change_mlps
from zeroshard.forwards.methods import refuse_files_of_slices
from zeroshard.forwards.quantized import QuantizedLayers, change_forwards
from zeroshard.forwards.wrapped import (
    cast_forwards,
    compile_forwards,
    exclude_from_tracing,
    recompute_forwards,
)
from zeroshard.lazy.deferred import has_memory
from zeroshard.lazy.recording import check_values, materialize_others, place_ignored, refuse_recording
from zeroshard.parallel.pipeline.chunked import Absent, Chunked
from zeroshard.parallel.pipeline.cut import ModelCut
from zeroshard.parallel.pipeline.part import ModelPart, take_part
from zeroshard.parallel.pipeline.traced import TracedChunks
from zeroshard.parallel.pipeline.weights import Products
from zeroshard.parallel.tensor.division import Division, plan_division
from zeroshard.parallel.tensor.layers import install
from zeroshard.parallel.tensor.losses import divide_losses, tile_losses
from zeroshard.parallel.tensor.replicas import compare_inputs
from zeroshard.parallel.tensor.sequence import Activations
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.parameters.saved import guard_copies
from zeroshard.plan.arrangement import Arrangement
from zeroshard.plan.buffers import group, plan_units, read_setting, units_ahead
from zeroshard.plan.names import Cast, find_ignored, find_modules, find_overrides, find_replicated
from zeroshard.plan.units import UnitSpec, find_units
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.context import Changes, Context
from zeroshard.sharding.gradients import Gradients
from zeroshard.sharding.runtime import Runtime, hook
from zeroshard.sharding.unit import Unit
from zeroshard.stores.store import GradientStore, TierMemory, gradients_of_others

_TAG_OF_ACTIVATIONS, _TAGS_PER_BUFFER = 1, 2


def shard_in_place(
    module: nn.Module, config: Config, mesh: DeviceMesh | None, tp_plan: Plan | None
) -> Runtime:
    """Shard a module over the ranks of the default process group, or of a mesh."""
    refuse_pipeline(config, "shard")
    if config.recompute == "auto":
        raise ValueError("config key 'recompute': expected 'none', 'lean' or 'unit' for shard(), got 'auto'")
    refuse_recording("shard")
    device = use_device(config.device or _device_of(module, mesh))
    world = open_world(device, config.watchdog_s)
    watch(world)
    axes = open_data_parallel(config, world, mesh)
    specs = specify_units(module, config)
    division = plan_division(module, specs, tp_plan, axes.tp.size, by_sequence=config.mesh.sequence)
    return shard_over(module, division, config, axes)


def specify_units(module: nn.Module, config: Config) -> list[UnitSpec]:
    """Return the units that a config asks for, see `find_units`. Raises ValueError as that does."""
    return find_units(module, config.units, config.ignored, config.precision.overrides, config.frozen)


def open_data_parallel(
    config: Config, world: Axis, mesh: DeviceMesh | None = None, *, is_local: bool = False
) -> Axes:
    """Open the axes that `config` asks for over all ranks, or the axes of a mesh; collective."""
    if mesh is None:
        group_size = config.shard_group_size or (1 if is_local else None)  # a replica is one rank
        asked = Arrangement(world.size, config.mesh.pp, config.mesh.tp, group_size)
        mesh = build_mesh(asked, world.device, config.watchdog_s)
    inner = config.reshard_after_forward
    return open_axes(mesh, world, inner_size=1 if isinstance(inner, bool) else inner, is_local=is_local)


def own_part(
    chunked: Chunked | TracedChunks, config: Config, cut: ModelCut, rank: int
) -> tuple[ModelPart, Config]:
    """Take the modules of other pipeline ranks out of a model, see `take_part`.

    Returns:
        The part, and the config without the names that other parts of the model have; the whole model has
        all.
    """
    model, precision, once = chunked.model, config.precision, config.reshard_after_forward is False
    units = {*find_modules(model, config.units)} if isinstance(config.units, tuple) else None
    ignored = find_ignored(model, config.ignored)
    overrides = find_overrides(model, precision.overrides, ignored)
    replicated = find_replicated(model, config.frozen, ignored)
    part = take_part(chunked, cut, rank, ignored, precision.param_dtype, gathers_once=once)
    # What is chosen is named in full: a pattern may fit another module in a part, and a tied parameter may
    # have the name that fits on another rank.
    named = dict(model.named_parameters(remove_duplicate=False))
    modules = model.named_modules(remove_duplicate=False)
    own = {name: overrides[p] for name, p in named.items() if p in overrides}
    return part, replace(
        config,
        ignored=[name for name, p in named.items() if p in ignored] or None,
        units=config.units if units is None else [name for name, one in modules if name and one in units],
        precision=replace(precision, overrides=own or None),
        frozen=[name for name, p in named.items() if p in replicated] or "shard",
    )


def shard_over(
    module: nn.Module,
    division: Division,
    config: Config,
    axes: Axes,
    *,
    steps_by_parts: bool = False,
    part: ModelPart | None = None,
) -> Runtime:
    """Shard a module in the units of a division; of a pipeline, the part that this rank holds."""
    changes, specs, device = Changes(), division.specs, axes.world.device
    ignored = find_ignored(module, config.ignored)
    over = Activations(axes.activations, _TAG_OF_ACTIVATIONS) if axes.tp.size > 1 else None
    change_forwards(module, changes)
    casts = prepare_forwards(module, division, config, over, changes)
    change_mlps(module, config.recompute, config.mlp.tiles, changes, is_whole=part is None)
    products = None if part is None or not part.has_halves else Products(module, changes)
    check_values(module)
    host_computes = not streams.has_streams(device)
    setting = read_setting(config, axes.sizes, host_computes=host_computes, steps_by_parts=steps_by_parts)
    plans = plan_units(specs, setting)
    context = Context(
        axes=axes,
        setting=setting,
        device=device,
        streams=Streams.on(device),
        memory=TierMemory(device, config.offload.nvme_path),
        num_prefetch=units_ahead(config.num_prefetch, plans),
        output_dtype=config.precision.output_dtype,
    )
    quantized = QuantizedLayers(module, context, changes, ignored)
    _take_over_buffers(module, context)
    place_ignored(ignored, device)
    pool, near = BufferPool(device), GradientStore()
    far = gradients_of_others(context.memory, context.streams.to_host)
    tags = _TAG_OF_ACTIVATIONS + 1
    units: list[Unit] = []
    for spec, plan in zip(specs, plans, strict=True):
        buffers = []
        for own, originals in zip(plan.buffers, group(spec.originals, setting.dtypes), strict=True):
            buffers.append(FlatBuffer(own, originals, spec.name, tags, context))
            tags += _TAGS_PER_BUFFER
        trained = [buffer for buffer in buffers if buffer.trainable]
        stores = [near if buffer.store.is_near else far for buffer in trained]
        gradients = [Gradients(b, context, pool, store) for b, store in zip(trained, stores, strict=True)]
        units.append(Unit(plan, spec.module, buffers, gradients, context.streams.gather))
    quantized.finish(buffer for unit in units for buffer in unit.buffers)
    if config.compile:
        compile_forwards(units, changes)
    if config.recompute == "unit":
        recompute_forwards(units, changes)
    budget = None
    if config.recompute == "auto":
        has_loop = type(module).forward is nn.Sequential.forward and (part is None or len(part.chunks) == 1)
        called = module._modules.values() if has_loop else ()  # a module may be called twice
        loop = [one for one in called if one is not None and not isinstance(one, Absent)]
        in_flight = 1.0 if part is None else part.in_flight
        asked, has_link = config.memory_budget, not (host_computes or config.compile)
        budget = Budget(units, changes, context, asked, loop, in_flight, has_link=has_link)
    if config.offload.activations == "cpu" and not host_computes:
        offload_activations(units, changes, context)
    exclude_from_tracing()
    runtime = Runtime(units, context, pool, changes)
    runtime.ignored, runtime.casts, runtime.budget, runtime.products = ignored, casts, budget, products
    hook(runtime)
    compare_inputs(runtime)
    guard_copies(module.modules(), changes.hook, changes.set)
    refuse_files_of_slices(runtime)
    refuse_wrappers(module.modules(), changes.set)
    return runtime


def prepare_forwards(
    module: nn.Module, division: Division, config: Config, over: Activations | None, changes: Changes
) -> dict[nn.Module, Cast]:
    """Give modules the forwards of divided layers, of dtypes of their own, and of a loss in tiles.

    Args:
        module: the model, with its original parameters.
        division: its units, and the layers that are divided.
        config: the config.
        over: the exchanges of the tensor ranks; None for one rank.
        changes: the changes of the model.

    Returns:
        The modules of this rank that compute in a dtype of their own.
    """
    originals = (original for spec in division.specs for original in spec.originals)
    overrides = {one.parameter: one.compute_dtype for one in originals if one.compute_dtype is not None}
    casts = find_casts(module, overrides, config.precision.param_dtype) if overrides else {}
    # A divided layer has another forward, which is cast as well; a norm gathers what it has cast back.
    divided = {layer.module for layer in division.layers if layer.has_other_forward}
    cast_forwards(module, {m: cast for m, cast in casts.items() if m not in divided}, changes)
    if over is not None:
        install(module, division.layers, over, changes)
        cast_forwards(module, {m: cast for m, cast in casts.items() if m in divided}, changes)
        divide_losses(module, division.layers, over, changes)
    tile_losses(module, division.specs, config.loss.tiles, changes, is_divided=config.mesh.tp > 1)
    return casts


def find_casts(
    root: nn.Module, overrides: Mapping[nn.Parameter, torch.dtype], param_dtype: torch.dtype | None
) -> dict[nn.Module, Cast]:
    """The modules that are cast, and all modules inside.

    A module of which this pipeline rank has a part only is not cast as a whole.

    Args:
        root: the model.
        overrides: the compute dtypes of some parameters.
        param_dtype: the compute dtype of the others; None: their own.
    """
    casts: dict[nn.Module, Cast] = {}

    def collect(module: nn.Module) -> None:
        dtypes = {overrides.get(parameter) for parameter in module.parameters()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None  # the one that patterns give to all of them
        is_called = type(module).forward is not nn.Module.forward  # a list of modules is not
        if dtype is None or not is_called or any(isinstance(one, Absent) for one in module.modules()):
            for child in module.children():
                collect(child)
            return
        for part in module.modules():
            own = next(part.parameters(recurse=False), None)
            given = own if own is not None else next(module.parameters())
            inside = casts[part].without if part in casts else dtype if own is not None else None
            casts[part] = Cast(dtype, param_dtype or given.dtype if part is module else inside)

    collect(root)
    return casts


def _take_over_buffers(module: nn.Module, context: Context) -> None:
    """Move the module's buffers to the device, shared ones together; all ranks get rank 0's values."""
    materialize_others(module)
    taken: dict[Tensor, Tensor] = {}
    for name, owner in module.named_modules():
        for attribute, buffer in owner._buffers.items():
            if buffer is None:
                continue
            if buffer not in taken:
                moved = buffer.to(context.device)
                values = moved.resolve_conj().resolve_neg().contiguous()
                label = f"first broadcast of buffer '{name}.{attribute}'"
                for axis in (context.axes.everyone, context.axes.outer):
                    axis.broadcast(values.detach(), label)
                # Kernels give other bits for other strides.
                taken[buffer] = values if moved.is_contiguous() else torch.empty_like(moved).copy_(values)
            owner._buffers[attribute] = taken[buffer]


def _device_of(module: nn.Module, mesh: DeviceMesh | None) -> str | None:
    """Return the accelerator of a module; else the device type of the mesh; None leaves the choice open."""
    first = next(module.parameters(), None)
    if first is not None and has_memory(first) and first.device.type != "cpu":
        return str(first.device)
    return mesh.device_type if mesh is not None else None
