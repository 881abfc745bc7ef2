"""The units of each pipeline rank, from a model or a number of parameters; one rank without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroshard.assemble import read_setting, specify_units
from zeroshard.config.sections import Config
from zeroshard.forwards.composed import taken_apart
from zeroshard.forwards.quantized import num_scale_bytes
from zeroshard.memory.activations import Sizes
from zeroshard.memory.dryrun import without_memory
from zeroshard.parallel.pipeline.actions import Schedule
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import ModelCut, cut_model
from zeroshard.parallel.pipeline.part import take_part
from zeroshard.parallel.pipeline.partition import BlockProfile, partition
from zeroshard.parallel.pipeline.profile import SampleSource
from zeroshard.parallel.pipeline.schedules import largest_schedule_of, read_schedule, with_schedule
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan.arrangement import Arrangement
from zeroshard.plan.buffers import Setting, UnitPlan, plan_buffer, plan_units, tiers_of_units
from zeroshard.plan.originals import Original
from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, SUMMANDS, TP
from zeroshard.plan.tiers import Tiers

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """A model that is cut into chunks."""

    schedule: Schedule
    """The lists that take the most memory."""
    num_microbatches: int
    runs: tuple[range, ...]
    """The blocks of each chunk."""
    cut: ModelCut | None = None
    """The cut; None for a number of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRanks:
    """The units of a model on all ranks."""

    setting: Setting
    units: tuple[list[UnitPlan], ...]
    """For each pipeline rank its units in order, the root first."""
    scales: tuple[int, ...]
    """For each pipeline rank the bytes of quantized weights other than their codes; each rank keeps them."""
    pipelined: PlannedPipeline | None = None


def setting_of(config: Config, world_size: int, *, host_computes: bool) -> Setting:
    """Return the setting of plans for a number of ranks. Raises ValueError for no multiple of the mesh."""
    mesh, inner = config.mesh, config.reshard_after_forward
    along = Arrangement(world_size, mesh.pp, mesh.tp, config.shard_group_size).sizes
    num_inner = 1 if isinstance(inner, bool) else inner
    if along.dp_shard % num_inner:
        raise ValueError(
            f"reshard_after_forward={inner}: expected a divisor of the {along.dp_shard} ranks over which "
            "parameters are sharded"
        )
    sizes = {DP_SHARD: along.dp_shard, DP_REPLICATE: along.dp_replicate, DP_INNER: num_inner, TP: along.tp}
    setting = read_setting(config, sizes, host_computes=host_computes, steps_by_parts=True)
    if mesh.pp == 1:
        return setting
    # A pipeline reduces gradients once a batch, at each stage.
    return replace(setting, placements=replace(setting.placements, gradient=SUMMANDS))


def plan_model(model: nn.Module, config: Config, setting: Setting, tp_plan: Plan | None) -> PlannedRanks:
    """Plan the units of a model, which does not change.

    Raises:
        ValueError: a parameter that cannot be sharded or divided; a model that cannot be cut.
    """
    with taken_apart(model, config.ignored):
        return _plan_apart(model, config, setting, tp_plan)


def _plan_apart(model: nn.Module, config: Config, setting: Setting, tp_plan: Plan | None) -> PlannedRanks:
    """Plan a model whose weights wrap no others."""
    if config.mesh.pp == 1:
        units = _units_of(model, specify_units(model, config), config, setting, tp_plan)
        return PlannedRanks(setting=setting, units=(units,), scales=(_scale_bytes(model),))
    if config.pipeline.trace:
        raise ValueError(
            "pipeline.trace: an estimate cannot trace a model, whose samples it does not have: expected False"
        )
    cut = cut_model(Chunked(without_memory(model)), config, SampleSource(), _CPU, measures=False)
    config = with_schedule(config, cut.schedule)
    ranks, scales = [], []
    for rank in range(config.mesh.pp):
        whole = without_memory(model)
        part = take_part(Chunked(whole), config, cut, rank)
        specs = part.named(specify_units(whole, part.narrowed))
        ranks.append(_units_of(whole, specs, part.narrowed, setting, tp_plan))
        scales.append(_scale_bytes(whole))
    schedule = largest_schedule_of(config)
    pipelined = PlannedPipeline(
        schedule=schedule, num_microbatches=config.pipeline.num_microbatches, runs=cut.runs, cut=cut
    )
    return PlannedRanks(setting=setting, units=tuple(ranks), scales=tuple(scales), pipelined=pipelined)


def _scale_bytes(model: nn.Module) -> int:
    return sum(map(num_scale_bytes, model.modules()))


def _units_of(
    model: nn.Module, specs: Any, config: Config, setting: Setting, tp_plan: Plan | None
) -> list[UnitPlan]:
    if setting.sizes[TP] > 1:
        is_sequence = config.mesh.sequence
        specs = plan_division(model, specs, tp_plan, setting.sizes[TP], by_sequence=is_sequence).specs
    return plan_units(specs, setting)


def plan_number(sizes: Sizes, config: Config, setting: Setting) -> PlannedRanks:
    """Plan the units of a typical model.

    Raises:
        ValueError: more chunks than blocks; dtypes by name.
    """
    if config.precision.overrides:
        patterns = ", ".join(dict(config.precision.overrides))
        raise ValueError(
            f"precision.overrides: expected a model, whose parameters have names, got a number of parameters "
            f"for the patterns {patterns}"
        )
    tp = setting.sizes[TP]
    if config.mesh.pp == 1:
        units = _units(*_counts(sizes, range(sizes.depth), tp=tp), setting)
        return PlannedRanks(setting=setting, units=(units,), scales=(0,))
    config = with_schedule(config, read_schedule(config))
    if config.pipeline.split is not None or config.pipeline.trace:
        raise ValueError("pipeline.split: expected a model, whose blocks have names, got a number")
    schedule = largest_schedule_of(config)
    if schedule.num_chunks > sizes.depth:
        raise ValueError(
            f"mesh.pp: expected at most {sizes.depth} chunks, one for each block of such a model, got "
            f"{schedule.num_chunks}"
        )
    runs = partition(_weights(sizes), schedule.num_chunks)
    ranks = tuple(
        _units(*_counts(sizes, *(runs[chunk] for chunk in schedule.chunks[rank]), tp=tp), setting)
        for rank in range(schedule.num_ranks)
    )
    pipelined = PlannedPipeline(
        schedule=schedule, num_microbatches=config.pipeline.num_microbatches, runs=runs
    )
    return PlannedRanks(setting=setting, units=ranks, scales=(0,) * len(ranks), pipelined=pipelined)


def _weights(sizes: Sizes) -> list[BlockProfile]:
    """The parameters of each block; the embedding belongs to the first one, the head to the last one."""
    numbers = list(sizes.blocks)
    numbers[0] += sizes.embedding
    numbers[-1] += sizes.embedding
    return [BlockProfile(time=number) for number in numbers]


def _counts(sizes: Sizes, *runs: range, tp: int) -> tuple[list[int], bool]:
    """Return the parameters of the units of a rank with some runs of blocks, divided over tensor ranks.

    Returns:
        The parameters of the root, and of the others; and True if the first of the others is an embedding,
        whose backward needs no parameters.
    """
    if not sizes.depth:  # neither the root nor the last: it is not kept
        return [0, -(-sizes.num_params // tp), 0], False
    blocks, starts = sizes.blocks, [run.start for run in runs]
    embeds, ends = 0 in starts, any(run.stop == sizes.depth for run in runs)
    table, own = -(-sizes.embedding // tp), [-(-blocks[number] // tp) for run in runs for number in run]
    if sizes.is_tied:  # the root holds the table that the embedding and the head share
        return [table if embeds or ends else 0, *own], False
    return [0, *([table] * embeds), *own, *([table] * ends)], embeds


def _units(sizes: Sequence[int], embeds: bool, setting: Setting) -> list[UnitPlan]:
    """The units in order, the root first."""
    planned: dict[tuple[int, Tiers], UnitPlan] = {}
    plans = []
    for key in zip(sizes, tiers_of_units(sizes, sizes, setting), strict=True):
        if key not in planned:
            planned[key] = _unit(key[0], replace(setting, tiers=key[1]))
        plans.append(planned[key])
    if embeds:
        plans[1] = replace(plans[1], needs_parameters_in_backward=False)
    return plans


def _unit(num_params: int, setting: Setting) -> UnitPlan:
    """Plan a unit of one float32 parameter with so many elements, or of none."""
    weight = nn.Parameter(torch.empty(num_params, device="meta"))
    return UnitPlan("", (plan_buffer([Original(weight, "", ())], setting),) if num_params else ())
