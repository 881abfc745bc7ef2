"""The composable layer: shard a module in place."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.counter import Counter
from zeroshard.comm.mesh import Axes, build_mesh, default_device, open_axes
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.streams import Streams
from zeroshard.config import Config, require_supported
from zeroshard.sharding.buffer import Context, FlatBuffer, Meter
from zeroshard.sharding.deferred import has_memory
from zeroshard.sharding.gradients import Gradients, ReducedGradients
from zeroshard.sharding.materialize import check_values, materialize_others, record_resets
from zeroshard.sharding.parameter import ShardedParameter
from zeroshard.sharding.placement import STAGES, DtypePolicy
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.sharding.units import UnitSpec, find_units

_TAGS_PER_BUFFER = 2

Replacements = dict[nn.Parameter, ShardedParameter]
"""Original parameter -> what replaced it."""


def shard(module: nn.Module, config: Config, mesh: DeviceMesh | None = None) -> Runtime:
    """Shard a module in place over the ranks of the default process group.

    Afterwards `module.parameters()` yields this rank's sharded parameters; make an optimizer over them
    and hand it to `runtime.attach(optimizer)`.

    Args:
        module: its parameters have values, rank 0's count; or it was built under `deferred_init`.
        config: stage, precision, units, prefetch.
        mesh: with an axis `dp_shard`; None: over all ranks.

    Raises:
        ValueError: what `config` asks for does not fit the module or the ranks.
    """
    device = _device_of(module)
    axes = open_axes(mesh or build_mesh(config, device), device, Counter(), config.watchdog_s)
    runtime, _ = shard_over(module, config, axes, device)
    return runtime


def shard_over(
    module: nn.Module, config: Config, axes: Axes, device: torch.device
) -> tuple[Runtime, Replacements]:
    """Shard a module in place and tell which parameter became which."""
    require_supported(config)
    record_resets(module)
    check_values(module)
    for name, parameter in module.named_parameters():
        compute_dtype = config.precision.param_dtype or parameter.dtype
        if parameter.requires_grad and compute_dtype is torch.float16:
            raise ValueError(
                f"not available in zeroshard yet: parameter '{name}' would be trained in float16, which "
                "needs loss scaling; set precision.param_dtype to bfloat16 or float32"
            )
    specs = find_units(module, config.units)
    context = Context(
        axis=axes.dp_shard,
        placements=STAGES[config.stage],
        device=device,
        streams=Streams.on(device),
        meter=Meter(),
        dtypes=dtype_policy(config),
    )
    _take_over_buffers(module, context)
    pool = BufferPool(device)
    replacements: Replacements = {}
    tags = 0
    units: list[Unit] = []
    for spec in specs:
        buffers = []
        for group in spec.groups():
            buffers.append(FlatBuffer(group, spec.name, tags, context))
            tags += _TAGS_PER_BUFFER
        for buffer in buffers:
            originals = (original.parameter for original in buffer.originals)
            replacements.update(zip(originals, buffer.sharded, strict=True))
        units.append(_build_unit(spec, buffers, context, pool))
    runtime = Runtime(
        units,
        context,
        pool,
        num_prefetch=config.num_prefetch,
        reshard_after_forward=bool(config.reshard_after_forward),
        output_dtype=config.precision.output_dtype,
    )
    return runtime, replacements


def dtype_policy(config: Config) -> DtypePolicy:
    """The dtypes that a config asks for."""
    precision = config.precision
    return DtypePolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        main_dtype=precision.main_dtype,
    )


def _build_unit(spec: UnitSpec, buffers: list[FlatBuffer], context: Context, pool: BufferPool) -> Unit:
    trained = [buffer for buffer in buffers if buffer.trainable]
    if context.axis.size == 1:
        return Unit(spec.name, spec.module, buffers, [Gradients(buffer) for buffer in trained])
    gradients = [ReducedGradients(buffer, context, pool, buffer.tag + 1) for buffer in trained]
    return Unit(spec.name, spec.module, buffers, list(gradients))


def _take_over_buffers(module: nn.Module, context: Context) -> None:
    """Move the module's buffers to the device and give every rank rank 0's values."""
    materialize_others(module)
    for name, owner in module.named_modules():
        for attribute, buffer in owner._buffers.items():
            if buffer is None:
                continue
            moved = buffer.to(context.device).contiguous()
            context.axis.broadcast(moved.detach(), f"first broadcast of buffer '{name}.{attribute}'")
            owner._buffers[attribute] = moved


def _device_of(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    if first is None:
        return torch.device("cpu")
    return first.device if has_memory(first) else default_device()
