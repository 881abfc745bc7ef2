"""Bytes that a rank would hold and send, computed without a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroshard.assemble import read_setting, specify_units
from zeroshard.config.sections import Config
from zeroshard.forwards.quantized import num_scale_bytes
from zeroshard.memory import traffic
from zeroshard.memory.activations import (
    DryRun,
    LossOf,
    MicroBatch,
    Sizes,
    Tokens,
    dry_run,
    loss_of_tokens,
    typical_sizes,
    without_memory,
)
from zeroshard.memory.report import STATES, ModelStates, byte_rows
from zeroshard.memory.tiered import States, bytes_on_tiers
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import cut_model
from zeroshard.parallel.pipeline.part import take_part
from zeroshard.parallel.pipeline.profile import SampleSource
from zeroshard.parallel.pipeline.schedules import with_schedule
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan.arrangement import Arrangement
from zeroshard.plan.buffers import Setting, UnitPlan, plan_units
from zeroshard.plan.originals import Original
from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, SUMMANDS, TP
from zeroshard.plan.tiers import Tier
from zeroshard.plan.units import UnitSpec
from zeroshard.tables import LINE, format_bytes, render


@dataclass(frozen=True, kw_only=True)
class Estimate(ModelStates):
    """Bytes per rank by kind, and on the wire. `unsharded` is 0: nothing is gathered between steps."""

    activations: int = 0
    """The most bytes of activations at a time; 0 where neither `num_tokens` nor `loss_of` was given."""
    wire_bytes_per_step: int
    """Bytes that each rank sends per optimizer step, all micro-batches together."""

    @property
    def peak(self) -> int:
        """Bytes when most is there: `total`, `peak_unsharded` and `activations`."""
        return self.total + self.peak_unsharded + self.activations

    def __str__(self) -> str:
        return side_by_side("estimate for each rank", {"bytes": self})


def side_by_side(title: str, estimates: Mapping[str, Estimate]) -> str:
    """Return a table with a column for each estimate; rows with zeros alone are left out.

    Args:
        title: the line above the table.
        estimates: estimates by the name of their column.
    """

    columns = estimates.values()
    others = {"gathered at the peak": "peak_unsharded", "activations": "activations"}
    rows = [
        *byte_rows(columns, STATES | others),
        LINE,
        *byte_rows(columns, {"total at the peak": "peak"}),
        LINE,
        *byte_rows(columns, {"on the host": "host", "on NVMe": "nvme"}),
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
    num_tokens: int | Tokens = 0,
    loss_of: LossOf | None = None,
    tp_plan: Plan | None = None,
) -> Estimate:
    """Bytes per rank for training with an optimizer of Adam's kind (two states).

    With a pipeline these are the bytes of the pipeline rank whose peak is the highest. Its blocks are cut by
    their parameters, as `initialize` does where it cannot measure their times.

    Args:
        model_or_num_params: a model, on the meta device if need be; or a number of float32 parameters, taken
            as a decoder-only transformer of a typical depth and width, see `zeroshard.memory.activations`.
        world_size: number of ranks.
        config: stage, precision, units, accumulation, prefetch, mesh, pipeline, tiers.
        optimizer_bits: 32 for states in the main dtype, as torch's AdamW has them; 8 for `AdamW8bit`. Counted
            without padding, on the rank that holds most.
        host_computes: True for ranks on the CPU, for which host memory is the device.
        num_tokens: tokens of a micro-batch of a rank (samples x length), or `Tokens` with a length, for the
            activations and the bytes that tensor ranks exchange; 0 leaves both out. The forward and the
            backward of a causal language model of transformers run without memory, see
            `zeroshard.memory.activations`. For a number of parameters the formulas of
            `zeroshard.memory.activations` hold. Not for a pipeline, whose ranks hold several micro-batches.
        loss_of: computes the loss of a micro-batch of any other model, in place of `num_tokens`. It is called
            with a copy of the model on the meta device, where tensors are made, too.
        tp_plan: the plan by which `config.mesh.tp` ranks divide the layers of a model, as `initialize` takes
            it; None for the model's own. A number of parameters is divided evenly.

    Raises:
        ValueError: fewer than 1 rank, or no multiple of the mesh; other bits than 8 and 32; a parameter that
            cannot be sharded or divided; a model that cannot be cut; more than 10**15 parameters; a number of
            parameters with `precision.overrides` or a pipeline; an asynchronous pipeline; a pipeline with
            `num_tokens` or `loss_of`; `num_tokens` with a model that is not of transformers; a forward or a
            backward that does not run without values.
    """
    counted = Counted(model_or_num_params, num_tokens, loss_of, tp_plan)
    return counted.on(world_size, config, optimizer_bits=optimizer_bits, host_computes=host_computes)


class Counted:
    """A model whose estimates are asked for several times; its activations are counted once for each way.

    Args:
        model_or_num_params, num_tokens, loss_of, tp_plan: see `estimate`.

    Raises:
        ValueError: see `estimate`.
    """

    def __init__(
        self,
        model_or_num_params: nn.Module | float,
        num_tokens: int | Tokens = 0,
        loss_of: LossOf | None = None,
        tp_plan: Plan | None = None,
    ) -> None:
        self._tokens = num_tokens if isinstance(num_tokens, Tokens) else Tokens(num_tokens)
        self._tp_plan, self._loss_of = tp_plan, loss_of
        self._model: nn.Module | None = None
        self._sizes: Sizes | None = None
        self._runs: dict[str, DryRun] = {}
        if isinstance(model_or_num_params, nn.Module):
            self._model = model_or_num_params
            if loss_of is None and self._tokens.num:
                self._loss_of = loss_of_tokens(model_or_num_params, self._tokens)
        else:
            self._sizes = typical_sizes(_checked_number(model_or_num_params))

    def on(
        self,
        world_size: int,
        config: Config | Mapping[str, Any] | None = None,
        *,
        optimizer_bits: int = 32,
        host_computes: bool = False,
    ) -> Estimate:
        """Return the estimate for some ranks and a config, see `estimate`."""
        config = Config.parse(config)
        if type(world_size) is not int or world_size < 1:
            raise ValueError(f"world_size: expected an integer >= 1, got {world_size!r}")
        if optimizer_bits not in (8, 32):
            raise ValueError(f"optimizer_bits: expected 8 or 32, got {optimizer_bits!r}")
        if config.pipeline.is_asynchronous:
            raise ValueError(
                "pipeline.schedule: expected a synchronous one for an estimate; of an asynchronous one "
                "`zeroshard plan` counts the versions of weights, and engine.memory_report() measures their "
                "bytes"
            )
        if config.mesh.pp > 1 and (self._loss_of is not None or self._tokens.num):
            raise ValueError(
                f"num_tokens, loss_of: expected mesh.pp=1 for activations, got {config.mesh.pp}. Of a "
                "pipeline `zeroshard plan` counts the micro-batches whose activations a rank holds"
            )
        setting = setting_of(config, world_size, host_computes=host_computes)
        states, usage = States(bits=optimizer_bits), DryRun()
        if self._model is None:
            assert self._sizes is not None, "it is a model or a number"
            planned = _plan_number(self._sizes, config, setting)
            batch = MicroBatch(
                num_tokens=self._tokens.num,
                itemsize=(config.precision.param_dtype or torch.float32).itemsize,
                tp=config.mesh.tp,
                sequence=config.mesh.sequence,
                recomputes=config.recompute == "unit",
                tiled=config.loss.tiles != "none",
            )
            usage = DryRun(self._sizes.bytes_held(batch), self._sizes.bytes_sent(batch))
        else:
            planned = _plan_model(self._model, config, setting, self._tp_plan)
            if self._loss_of is not None:
                usage = self._run(self._model, config, setting, self._loss_of)
        estimates = (
            replace(_of_rank(units, setting, config, states, usage), scales=scales)
            for units, scales in planned
        )
        return max(estimates, key=lambda found: found.peak)

    def _run(self, model: nn.Module, config: Config, setting: Setting, loss_of: LossOf) -> DryRun:
        """A dry run depends neither on the stage nor on tiers."""
        key = repr(
            (config.precision, config.recompute, config.loss, config.mesh, config.units, config.ignored)
        )
        if key not in self._runs:
            self._runs[key] = dry_run(model, config, setting, loss_of, self._tp_plan)
        return self._runs[key]


def _checked_number(given: object) -> int:
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    raise ValueError(f"expected a model or a number of parameters, got {given!r}")


def _of_rank(
    units: list[UnitPlan],
    setting: Setting,
    config: Config,
    states: States,
    usage: DryRun,
) -> Estimate:
    """The estimate of a rank with some units."""
    steps = config.gradient_accumulation_steps * config.pipeline.num_microbatches
    together = 1 + config.num_prefetch if setting.placements.kept else len(units)
    tiers = bytes_on_tiers(units, setting, steps, states)
    device = tiers[Tier.DEVICE]
    return Estimate(
        parameters=device.parameters,
        gradients=device.gradients,
        optimizer=device.optimizer + device.buffers,
        unsharded=0,
        peak_unsharded=traffic.peak_unsharded_bytes(units, together),
        host=tiers[Tier.HOST].total,
        nvme=tiers[Tier.DISK].total,
        activations=usage.peak,
        wire_bytes_per_step=traffic.wire_bytes(units, setting, steps) + usage.sent * steps,
    )


# ---------------------------------------------------------------------------------- the units of ranks


_CPU = torch.device("cpu")

RankUnits = tuple[list[UnitPlan], int]
"""The units of a pipeline rank, the root first; and bytes of quantized weights other than their codes."""


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


def _plan_model(model: nn.Module, config: Config, setting: Setting, tp_plan: Plan | None) -> list[RankUnits]:
    """Plan the units of a model on each pipeline rank; the model does not change.

    Raises:
        ValueError: a parameter that cannot be sharded or divided; a model that cannot be cut.
    """
    if config.mesh.pp == 1:
        units = _units_of(model, specify_units(model, config), config, setting, tp_plan)
        return [(units, _scale_bytes(model))]
    if config.pipeline.trace:
        raise ValueError(
            "pipeline.trace: an estimate cannot trace a model, whose samples it does not have: expected False"
        )
    cut = cut_model(Chunked(without_memory(model)), config, SampleSource(), _CPU, counts=False)
    config = with_schedule(config, cut.schedule)
    ranks = []
    for rank in range(config.mesh.pp):
        whole = without_memory(model)
        part = take_part(Chunked(whole), config, cut, rank)
        specs = part.named(specify_units(whole, part.narrowed))
        units = _units_of(whole, specs, part.narrowed, setting, tp_plan)
        ranks.append((units, _scale_bytes(whole)))
    return ranks


def _scale_bytes(model: nn.Module) -> int:
    return sum(map(num_scale_bytes, model.modules()))


def _units_of(
    model: nn.Module, specs: Any, config: Config, setting: Setting, tp_plan: Plan | None
) -> list[UnitPlan]:
    if setting.sizes[TP] > 1:
        is_sequence = config.mesh.sequence
        specs = plan_division(model, specs, tp_plan, setting.sizes[TP], by_sequence=is_sequence).specs
    return plan_units(specs, setting)


def _plan_number(sizes: Sizes, config: Config, setting: Setting) -> list[RankUnits]:
    """Plan the units of a typical model: the root, which holds a tied table, the table, blocks, the head.

    Raises:
        ValueError: a pipeline or dtypes by name, which need the names of a model.
    """
    if config.precision.overrides or config.mesh.pp > 1:
        raise ValueError(
            "precision.overrides, mesh.pp > 1: expected a model, whose parameters and blocks have names, got "
            "a number of parameters"
        )
    tp = setting.sizes[TP]
    if not sizes.depth:  # neither the root nor the last: it is not kept
        return [(_units([0, -(-sizes.num_params // tp), 0], False, setting), 0)]
    table, blocks = -(-sizes.embedding // tp), [-(-block // tp) for block in sizes.blocks]
    nums = [table, *blocks] if sizes.is_tied else [0, table, *blocks, table]
    return [(_units(nums, not sizes.is_tied, setting), 0)]


def _units(sizes: Sequence[int], embeds: bool, setting: Setting) -> list[UnitPlan]:
    """The units in order, the root first: each of one float32 parameter with so many elements, or of none."""
    weights = (nn.Parameter(torch.empty(num, device="meta")) for num in sizes)
    originals = [[Original(weight, "", ())] if weight.numel() else [] for weight in weights]
    modules = [nn.Module()] * len(sizes)
    if embeds:
        modules[1] = nn.Embedding(1, 1)
    names = ["", *map(str, range(1, len(sizes)))]
    found = zip(names, modules, originals, strict=True)
    return plan_units([UnitSpec(name, module, own) for name, module, own in found], setting)
