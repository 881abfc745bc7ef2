"""What a rank would hold and send, computed without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from zeroshard.assemble import dtype_policy
from zeroshard.config.sections import Config, require_supported
from zeroshard.memory.report import MemoryReport
from zeroshard.optim.eightbit.blocks import num_blocks
from zeroshard.optim.eightbit.states import MIN_8BIT_SIZE
from zeroshard.plan.layout import Layout
from zeroshard.plan.originals import Original
from zeroshard.plan.placement import STAGES, BufferPlan, Placements, plan_buffer
from zeroshard.plan.wrapping import find_units
from zeroshard.sharding.unit import needs_parameters_in_backward

ADAM_STATES = 2
"""Tensors of optimizer state for each trained parameter (exp_avg, exp_avg_sq)."""


@dataclass(frozen=True, kw_only=True)
class Estimate(MemoryReport):
    """Bytes per rank by kind, and on the wire."""

    _title: ClassVar[str] = "estimate for each rank"

    wire_bytes_per_step: int
    """Bytes that each rank sends per optimizer step, all micro-batches together."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A flat buffer to be."""

    plan: BufferPlan
    layout: Layout
    trainable: bool

    @property
    def size(self) -> int:
        """Elements with padding."""
        return self.layout.total

    @property
    def held(self) -> int:
        """Those of a rank's main parameters."""
        return self.layout.shard_size if self.plan.is_partial else self.size

    def steppers(self, index: int) -> range:
        """The ranks that step a part of a parameter."""
        if not self.plan.is_partial:
            return range(self.layout.num_ranks)
        span, size = self.layout.parameter(index), max(1, self.layout.shard_size)
        return range(span.start // size, -(-span.stop // size))

    def slice_size(self, index: int, rank: int) -> int:
        """Elements of a parameter that a rank steps."""
        return self.layout.owned(index, rank).size if self.plan.is_partial else self.layout.sizes[index]


@dataclass(frozen=True, slots=True)
class _Unit:
    buffers: tuple[_Buffer, ...]
    backward_needs_parameters: bool = True

    @property
    def unsharded_bytes(self) -> int:
        """What gathering it takes beyond what is there at rest."""
        return sum(b.size * b.plan.compute_dtype.itemsize for b in self.buffers if not b.plan.is_resident)


def estimate(
    model_or_num_params: nn.Module | float,
    world_size: int,
    config: Config | Mapping[str, Any] | None = None,
    *,
    optimizer_bits: int = 32,
) -> Estimate:
    """Bytes per rank for training with an optimizer of Adam's kind (two states).

    Args:
        model_or_num_params: a model, on the meta device if need be; or a number of float32 parameters,
            taken as one unit that is freed after forward.
        world_size: number of ranks.
        config: stage, precision, units, accumulation, prefetch.
        optimizer_bits: 32 for states in the main dtype, as torch's AdamW has them; 8 for `AdamW8bit`. Counted
            without padding, on the rank that holds most.

    Raises:
        ValueError: fewer than 1 rank, or no multiple of the shard group; other bits than 8 and 32; a
            parameter that cannot be sharded.
    """
    config = Config.parse(config)
    require_supported(config)
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size: expected an integer >= 1, got {world_size!r}")
    if optimizer_bits not in (8, 32):
        raise ValueError(f"optimizer_bits: expected 8 or 32, got {optimizer_bits!r}")
    if isinstance(model_or_num_params, float) and model_or_num_params.is_integer():
        model_or_num_params = int(model_or_num_params)
    is_number = isinstance(model_or_num_params, int) and not isinstance(model_or_num_params, bool)
    if not (isinstance(model_or_num_params, nn.Module) or (is_number and model_or_num_params > 0)):
        raise ValueError(f"expected a model or a number of parameters, got {model_or_num_params!r}")
    placements, group_size = STAGES[config.stage], config.shard_group_size or world_size
    if world_size % group_size:
        raise ValueError(
            f"world_size: expected a multiple of shard_group_size={group_size}, got {world_size}"
        )
    units = _units(model_or_num_params, world_size, config)
    buffers = [buffer for unit in units for buffer in unit.buffers]
    peak = _peak_unsharded(units, config)
    return Estimate(
        parameters=sum(_parameter_bytes(buffer) for buffer in buffers),
        gradients=sum(_gradient_bytes(b, placements, config) for b in buffers if b.trainable),
        optimizer=_optimizer_bytes((b for b in buffers if b.trainable), group_size, optimizer_bits),
        unsharded=0,
        peak_unsharded=peak,
        wire_bytes_per_step=_wire_bytes(units, placements, world_size, config),
    )


def _units(model_or_num_params: nn.Module | float, world_size: int, config: Config) -> list[_Unit]:
    """The units in order, the root first."""
    if not isinstance(model_or_num_params, nn.Module):
        weight = nn.Parameter(torch.empty(int(model_or_num_params), device="meta"))
        only = _Unit((_group([Original(weight, "", ())], world_size, config),))
        return [_Unit(()), only, _Unit(())]  # neither the root nor the last: it is not kept
    return [
        _Unit(
            tuple(_group(group, world_size, config) for group in spec.groups(dtype_policy(config))),
            needs_parameters_in_backward(spec.modules),
        )
        for spec in find_units(model_or_num_params, config.units, config.ignored)
    ]


def _group(originals: Sequence[Original], world_size: int, config: Config) -> _Buffer:
    """One flat buffer to be."""
    num_ranks = config.shard_group_size or world_size
    first, dtypes = originals[0].parameter, dtype_policy(config).where(originals[0].keeps_dtype)
    plan = plan_buffer(STAGES[config.stage], dtypes, first.dtype, first.requires_grad, num_ranks)
    sizes = tuple(original.parameter.numel() for original in originals)
    layout = Layout(sizes, num_ranks, world_size // num_ranks)
    return _Buffer(plan, layout, first.requires_grad)


def _parameter_bytes(buffer: _Buffer) -> int:
    resident = buffer.size * buffer.plan.compute_dtype.itemsize if buffer.plan.is_resident else 0
    return resident + (0 if buffer.plan.is_alias else buffer.held * buffer.plan.main_dtype.itemsize)


def _gradient_bytes(buffer: _Buffer, placements: Placements, config: Config) -> int:
    if config.gradient_accumulation_steps == 1:
        return buffer.held * buffer.plan.main_dtype.itemsize
    return (buffer.size if placements.accumulates_locally else buffer.held) * buffer.plan.wide_dtype.itemsize


def _optimizer_bytes(buffers: Iterable[_Buffer], num_ranks: int, bits: int) -> int:
    """Of the rank that holds most."""
    totals = [0] * num_ranks
    for buffer in buffers:
        for index, whole in enumerate(buffer.layout.sizes):
            for rank in buffer.steppers(index):
                num = buffer.slice_size(index, rank)
                if bits == 32:
                    totals[rank] += num * buffer.plan.wide_dtype.itemsize
                elif whole < MIN_8BIT_SIZE:
                    totals[rank] += num * torch.float32.itemsize
                else:
                    totals[rank] += num + num_blocks(num) * torch.float32.itemsize
    return ADAM_STATES * max(totals)


def _peak_unsharded(units: list[_Unit], config: Config) -> int:
    """The root and the units that are gathered together: one in use and those ahead of it."""
    root, *others = [unit.unsharded_bytes for unit in units]
    together = 1 + config.num_prefetch if config.reshard_after_forward else len(others)
    windows = [sum(others[start : start + together]) for start in range(len(others))]
    return root + max(windows, default=0)


def _wire_bytes(units: list[_Unit], placements: Placements, world_size: int, config: Config) -> int:
    steps, num_ranks = config.gradient_accumulation_steps, config.shard_group_size or world_size
    num_groups = world_size // num_ranks
    second = _second_group(config, num_ranks)
    total = 0
    for number, unit in enumerate(units):
        kept = number in (0, len(units) - 1) or not unit.backward_needs_parameters
        regathers = config.reshard_after_forward and not kept
        for buffer in unit.buffers:
            plan, size = buffer.plan, buffer.size
            reductions = (1 if placements.accumulates_locally else steps) if buffer.trainable else 0
            total += reductions * _to_others(size * plan.reduce_dtype.itemsize, num_ranks)
            if num_groups > 1:
                shard_bytes = size // num_ranks * plan.wide_dtype.itemsize
                total += 2 * reductions * _to_others(shard_bytes, num_groups)
            if placements.gathers_gradients:
                total += reductions * _to_others(size * plan.wide_dtype.itemsize, num_ranks)
            elif placements.frees_parameters:
                num_bytes = size * plan.compute_dtype.itemsize
                total += steps * _to_others(num_bytes, num_ranks)
                if regathers:
                    total += steps * _to_others(num_bytes, second)
            elif buffer.trainable:
                total += _to_others(size * plan.compute_dtype.itemsize, num_ranks)
    return total


def _to_others(num_bytes: int, num_ranks: int) -> int:
    """What a rank sends in an all-gather or reduce-scatter of so many bytes."""
    return num_bytes * (num_ranks - 1) // num_ranks


def _second_group(config: Config, num_ranks: int) -> int:
    """The ranks among which backward gathers."""
    among = config.reshard_after_forward
    return num_ranks if isinstance(among, bool) else among
