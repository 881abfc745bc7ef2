"""Bytes that a rank would hold and send, computed without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroshard.assemble import read_setting, specify_units
from zeroshard.config.sections import Config, refuse_pipeline, require_supported
from zeroshard.forwards.composed import taken_apart
from zeroshard.forwards.quantized import num_scale_bytes
from zeroshard.memory.activations import Blocks
from zeroshard.memory.report import ModelStates
from zeroshard.memory.tiered import States, bytes_on_tiers
from zeroshard.memory.typical import typical_sizes
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan import traffic
from zeroshard.plan.arrangement import Arrangement
from zeroshard.plan.buffers import Setting, UnitPlan, plan_buffer, plan_units, units_on_device
from zeroshard.plan.originals import Original
from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, TP
from zeroshard.plan.tiers import Tier
from zeroshard.tables import LINE, format_bytes, render


@dataclass(frozen=True, kw_only=True)
class Estimate(ModelStates):
    """Bytes per rank by kind, and on the wire. `unsharded` is 0: nothing is gathered between steps."""

    activations: int = 0
    """Bytes between the forward and the backward of a micro-batch; 0 where `num_tokens` was not given."""
    wire_bytes_per_step: int
    """Bytes that each rank sends per optimizer step, all micro-batches together."""

    @property
    def peak(self) -> int:
        """Bytes when most parameters are gathered: `total`, `peak_unsharded` and `activations`."""
        return self.total + self.peak_unsharded + self.activations

    def __str__(self) -> str:
        return side_by_side("estimate for each rank", {"bytes": self})


def side_by_side(title: str, estimates: Mapping[str, Estimate]) -> str:
    """Return a table with a column for each estimate; rows with zeros alone are left out.

    Args:
        title: the line above the table.
        estimates: estimates by the name of their column.
    """

    def row(kind: str, counts: Iterable[int]) -> list[tuple[str, ...]]:
        counts = list(counts)
        return [(kind, *map(format_bytes, counts))] if any(counts) else []

    columns = estimates.values()
    rows = [
        *row("parameters", (e.parameters for e in columns)),
        *row("scales of codes", (e.scales for e in columns)),
        *row("gradients", (e.gradients for e in columns)),
        *row("optimizer states", (e.optimizer for e in columns)),
        *row("gathered at the peak", (e.peak_unsharded for e in columns)),
        *row("activations", (e.activations for e in columns)),
        LINE,
        *row("total at the peak", (e.peak for e in columns)),
        LINE,
        *row("on the host", (e.host for e in columns)),
        *row("on NVMe", (e.nvme for e in columns)),
        ("sent in a step", *(format_bytes(e.wire_bytes_per_step) for e in columns)),
    ]
    return render(title, ("for each rank", *estimates), rows)


def estimate(
    model_or_num_params: nn.Module | float,
    world_size: int,
    config: Config | Mapping[str, Any] | None = None,
    *,
    optimizer_bits: int = 32,
    host_computes: bool = False,
    num_tokens: int = 0,
    tp_plan: Plan | None = None,
) -> Estimate:
    """Bytes per rank for training with an optimizer of Adam's kind (two states).

    Args:
        model_or_num_params: a model, on the meta device if need be; or a number of float32 parameters, taken
            as a decoder-only transformer of a typical depth and width, see `zeroshard.memory.typical`.
        world_size: number of ranks.
        config: stage, precision, units, accumulation, prefetch.
        optimizer_bits: 32 for states in the main dtype, as torch's AdamW has them; 8 for `AdamW8bit`. Counted
            without padding, on the rank that holds most.
        host_computes: True for ranks on the CPU, for which host memory is the device.
        num_tokens: tokens of a micro-batch of a rank (samples x sequence length), for the activations of a
            decoder-only transformer and the bytes that tensor ranks exchange; 0 leaves both out.
        tp_plan: the plan by which `config.mesh.tp` ranks divide the layers of a model, as `initialize` takes
            it; None for the model's own. A number of parameters is divided evenly.

    Raises:
        ValueError: a pipeline; fewer than 1 rank, or no multiple of the mesh; other bits than 8 and 32; a
            parameter that cannot be sharded or divided; more than 10**15 parameters; a number of parameters
            with `precision.overrides`; `num_tokens` with a model that does not tell its sizes.
    """
    config = Config.parse(config)
    require_supported(config)
    refuse_pipeline(config, "estimate")
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size: expected an integer >= 1, got {world_size!r}")
    if optimizer_bits not in (8, 32):
        raise ValueError(f"optimizer_bits: expected 8 or 32, got {optimizer_bits!r}")
    if isinstance(model_or_num_params, float) and model_or_num_params.is_integer():
        model_or_num_params = int(model_or_num_params)
    is_number = isinstance(model_or_num_params, int) and not isinstance(model_or_num_params, bool)
    if not (isinstance(model_or_num_params, nn.Module) or (is_number and model_or_num_params > 0)):
        raise ValueError(f"expected a model or a number of parameters, got {model_or_num_params!r}")
    if type(num_tokens) is not int or num_tokens < 0:
        raise ValueError(f"num_tokens: expected an integer >= 0, got {num_tokens!r}")
    setting = _setting(config, world_size, host_computes)
    with _without_wrappers(model_or_num_params, config):
        units = _units(model_or_num_params, config, setting, tp_plan)
        scales = _scale_bytes(model_or_num_params)
    steps = config.gradient_accumulation_steps
    together = 1 + config.num_prefetch if setting.placements.kept else len(units)
    tiers = bytes_on_tiers(units, setting, steps, States(bits=optimizer_bits))
    device = tiers[Tier.DEVICE]
    held, sent = _activations(model_or_num_params, num_tokens, config) if num_tokens else (0, 0)
    return Estimate(
        parameters=device.parameters,
        gradients=device.gradients,
        optimizer=device.optimizer,
        scales=scales,
        unsharded=0,
        peak_unsharded=traffic.peak_unsharded_bytes(units, together),
        host=tiers[Tier.HOST].total,
        nvme=tiers[Tier.DISK].total,
        activations=held,
        wire_bytes_per_step=traffic.wire_bytes(units, setting, steps) + steps * sent,
    )


def _setting(config: Config, world_size: int, host_computes: bool) -> Setting:
    mesh, inner = config.mesh, config.reshard_after_forward
    along = Arrangement(world_size, mesh.pp, mesh.tp, config.shard_group_size).sizes
    num_inner = 1 if isinstance(inner, bool) else inner
    if along.dp_shard % num_inner:
        raise ValueError(
            f"reshard_after_forward={inner}: expected a divisor of the {along.dp_shard} ranks over which "
            "parameters are sharded"
        )
    sizes = {DP_SHARD: along.dp_shard, DP_REPLICATE: along.dp_replicate, DP_INNER: num_inner, TP: along.tp}
    return read_setting(config, sizes, host_computes=host_computes)


def _without_wrappers(model_or_num_params: nn.Module | float, config: Config) -> AbstractContextManager[None]:
    """A context in which weights that wrap other tensors are apart, as sharding takes them."""
    if isinstance(model_or_num_params, nn.Module):
        return taken_apart(model_or_num_params, config.ignored)
    return nullcontext()


def _scale_bytes(model_or_num_params: nn.Module | float) -> int:
    """Bytes beside the codes of quantized weights, which each rank keeps whole."""
    if not isinstance(model_or_num_params, nn.Module):
        return 0
    return sum(num_scale_bytes(module) for module in model_or_num_params.modules())


def _activations(model_or_num_params: nn.Module | float, num_tokens: int, config: Config) -> tuple[int, int]:
    """Bytes that a rank holds for a micro-batch, and sends to its tensor ranks."""
    blocks, tp, recomputes = Blocks.of(model_or_num_params), config.mesh.tp, config.recompute == "unit"
    itemsize = (config.precision.param_dtype or torch.float32).itemsize
    held = blocks.bytes_held(
        num_tokens, itemsize, tp=tp, sequence=config.mesh.sequence, recomputes=recomputes
    )
    return held, blocks.bytes_sent(num_tokens, itemsize, tp=tp, recomputes=recomputes)


def _units(
    model_or_num_params: nn.Module | float, config: Config, setting: Setting, tp_plan: Plan | None
) -> list[UnitPlan]:
    """The units in order, the root first."""
    tp = setting.sizes[TP]
    if isinstance(model_or_num_params, nn.Module):
        specs = specify_units(model_or_num_params, config)
        if tp > 1:
            is_sequence = config.mesh.sequence
            specs = plan_division(model_or_num_params, specs, tp_plan, tp, by_sequence=is_sequence).specs
        return plan_units(specs, setting)
    if config.precision.overrides:
        patterns = ", ".join(dict(config.precision.overrides))
        raise ValueError(
            f"precision.overrides: expected a model, whose parameters have names, got a number of parameters "
            f"for the patterns {patterns}"
        )
    sizes = typical_sizes(int(model_or_num_params))
    if not sizes.depth:  # neither the root nor the last: it is not kept
        return [_unit(0, setting), _unit(-(-sizes.num_params // tp), setting), _unit(0, setting)]
    around = [sizes.embedding] if sizes.is_tied else [0, sizes.embedding]
    counts = [
        -(-count // tp) for count in (*around, *sizes.blocks, *([] if sizes.is_tied else [sizes.embedding]))
    ]
    on_device = replace(setting, tiers=setting.tiers.on_device)
    planned: dict[tuple[int, bool], UnitPlan] = {}
    plans = []
    for key in zip(counts, units_on_device(counts, setting.device_fraction), strict=True):
        if key not in planned:
            planned[key] = _unit(key[0], on_device if key[1] else setting)
        plans.append(planned[key])
    if not sizes.is_tied:  # else the root holds what the embedding and the head share
        plans[1] = replace(plans[1], needs_parameters_in_backward=False)
    return plans


def _unit(num_params: int, setting: Setting) -> UnitPlan:
    """Plan a unit of one float32 parameter with so many elements, or of none."""
    weight = nn.Parameter(torch.empty(num_params, device="meta"))
    return UnitPlan("", (plan_buffer([Original(weight, "", ())], setting),) if num_params else ())
