"""Bytes that a rank would hold and send, computed without a process group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zeroshard.config.sections import Config
from zeroshard.forwards.keeping import NO_LINK, Interval, Link, choose_keeping, time_line
from zeroshard.memory import tiered
from zeroshard.memory.tiered import STATES, ModelStates, States, byte_rows
from zeroshard.memory.typical import RECOMPUTED, DryRun, RankUnits, TypicalModel, planned_bytes, typical_sizes
from zeroshard.plan.arrangement import Arrangement
from zeroshard.plan.buffers import Setting, read_setting, units_ahead
from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, SUMMANDS, TP
from zeroshard.plan.tiers import Tier
from zeroshard.tables import LINE, format_bytes, render

if TYPE_CHECKING:
    from torch import nn

    from zeroshard.forwards.dryrun import LossOf
    from zeroshard.memory.activations import ModelWithoutMemory
    from zeroshard.parallel.tensor.styles import Plan


@dataclass(frozen=True, kw_only=True)
class Estimate(ModelStates):
    """Bytes per rank by kind, and on the wire. `unsharded` is 0: nothing is gathered between steps."""

    activations: int = 0
    """The most bytes of activations at a time; 0 where neither `num_tokens` nor `loss_of` was given."""
    extra_time: float = 0.0
    """The share by which forward and backward take longer than if all units kept their activations, by the
    operations of units: a third, less the root's part, with recompute="unit"."""
    wire_bytes_per_step: int
    """Bytes that each rank sends per optimizer step, all micro-batches together."""
    time_line: tuple[Interval, ...] = ()
    """With a plan for a memory budget: (row, label, begin, end) of forwards and backwards, in operations."""

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
    if any(e.extra_time for e in columns):
        rows.append(("forward and backward, longer by", *(f"{e.extra_time:.1%}" for e in columns)))
    return render(title, ("for each rank", *estimates), rows)


def estimate(
    model_or_num_params: nn.Module | float,
    world_size: int,
    config: Config | Mapping[str, Any] | None = None,
    *,
    optimizer_bits: int = 32,
    host_computes: bool = False,
    num_tokens: int | tuple[int, int] = 0,
    loss_of: LossOf | None = None,
    tp_plan: Plan | None = None,
) -> Estimate:
    """Bytes per rank for training with an optimizer of Adam's kind (two states).

    With a pipeline these are the bytes of the pipeline rank whose peak is the highest. Its blocks are cut by
    their parameters, as `initialize` does where it cannot measure their times.

    Args:
        model_or_num_params: a model, on the meta device if need be; or a number of float32 parameters, taken
            as a decoder-only transformer of a typical depth and width, see `zeroshard.memory.typical`.
        world_size: number of ranks.
        config: stage, precision, units, accumulation, prefetch, mesh, pipeline, tiers. With recompute="auto"
            a `memory_budget` in bytes says which units recompute; no activations go to the host.
        optimizer_bits: 32 for states in the main dtype, as torch's AdamW has them; 8 for `AdamW8bit`. Counted
            without padding, on the rank that holds most.
        host_computes: True for ranks on the CPU, for which host memory is the device.
        num_tokens: tokens of a micro-batch of a rank, of one sample, or (samples, length), for the
            activations and the bytes that tensor ranks exchange; 0 leaves both out. The forward and the
            backward of a causal language model of transformers run without memory, and for a number of
            parameters formulas hold: see `zeroshard.memory.typical`. Not for a pipeline, whose ranks hold
            several micro-batches.
        loss_of: computes the loss of a micro-batch of any other model, in place of `num_tokens`. It is called
            with a copy of the model on the meta device, where tensors are made, too.
        tp_plan: the plan by which `config.mesh.tp` ranks divide the layers of a model, as `initialize` takes
            it; None for the model's own. A number of parameters is divided evenly.

    Raises:
        ValueError: fewer than 1 rank, or no multiple of the mesh; other bits than 8 and 32; a parameter that
            cannot be sharded or divided; a model that cannot be cut; a number below 2**20 or
            above 10**15, or with `precision.overrides` or a pipeline; an asynchronous pipeline; a pipeline
            with `num_tokens` or `loss_of`; `num_tokens` with a model that is not of transformers; a
            forward or a backward that does not run without values.
    """
    counted = Counted(model_or_num_params, num_tokens, loss_of, tp_plan)
    return counted.on(world_size, config, optimizer_bits=optimizer_bits, host_computes=host_computes)


class Counted:
    """A model whose estimates are asked for several times; its activations are counted once for each way.

    Args:
        model_or_num_params, num_tokens, loss_of, tp_plan: see `estimate`.
        link: rates of the link to the host and back, in bytes per operation, if a plan for a budget may send
            activations there.

    Raises:
        ValueError: see `estimate`.
    """

    def __init__(
        self,
        model_or_num_params: nn.Module | float,
        num_tokens: int | tuple[int, int] = 0,
        loss_of: LossOf | None = None,
        tp_plan: Plan | None = None,
        link: tuple[float, float] | None = None,
    ) -> None:
        self._link = NO_LINK if link is None else Link(to_host=link[0], from_host=link[1])
        shape = num_tokens if isinstance(num_tokens, tuple) else (1, num_tokens)
        if any(type(num) is not int or num < 0 for num in shape):
            raise ValueError(f"num_tokens: expected an integer >= 0, got {num_tokens!r}")
        self._model: TypicalModel | ModelWithoutMemory
        num, model = math.prod(shape), model_or_num_params
        self._has_activations = num > 0
        if isinstance(model, int | float | type) or not hasattr(model, "parameters"):
            self._model = TypicalModel(typical_sizes(_checked_number(model)), num)
        else:
            from zeroshard.memory import activations  # a number needs no torch

            loss_of = activations.loss_of_tokens(shape) if loss_of is None and num else loss_of
            self._model = activations.ModelWithoutMemory(model, loss_of, tp_plan)
            self._has_activations = loss_of is not None

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
        if config.mesh.pp > 1 and self._has_activations:
            raise ValueError(
                f"num_tokens, loss_of: expected mesh.pp=1 for activations, got {config.mesh.pp}. Of a "
                "pipeline `zeroshard plan` counts the micro-batches whose activations a rank holds"
            )
        setting = setting_of(config, world_size, host_computes=host_computes)
        usage = self._model.usage(config, setting) if self._has_activations else DryRun()
        ranks, states = self._model.planned(config, setting), States(bits=optimizer_bits)
        steps = config.gradient_accumulation_steps * config.pipeline.num_microbatches
        found = max(
            (estimate_of_rank(own, setting, config, steps, states, usage) for own in ranks),
            key=lambda one: one.peak,
        )
        return self._within_budget(found, config, usage) if self._has_activations else found

    def _within_budget(self, found: Estimate, config: Config, usage: DryRun) -> Estimate:
        """Return an estimate with the choices of units, and what they cost in time."""
        if config.recompute not in RECOMPUTED:
            return found
        keep = max(1, sum(unit.forward + unit.backward for unit in usage.units))
        if not (budget := planned_bytes(config)):
            return replace(found, extra_time=sum(unit.forward for unit in usage.units[:-1]) / keep)
        room = budget - (found.peak - found.activations)
        units = [unit.options(self._link) for unit in usage.units]
        plan = choose_keeping(units, int(room) - usage.others, self._link)
        peak, line = plan.peak + usage.others, tuple(time_line(plan, self._link))
        return replace(found, activations=peak, extra_time=plan.seconds / keep - 1, time_line=line)


def estimate_of_rank(
    own: RankUnits, setting: Setting, config: Config, steps: int, states: States, usage: DryRun
) -> Estimate:
    """Return the bytes of a rank with some units.

    Args:
        own: the units that it holds.
        setting, config: the setting of their plans, and the config.
        steps: micro-batches of a step.
        states: the states of the optimizer.
        usage: what a micro-batch takes.
    """
    units, scales = own
    together = 1 + units_ahead(config.num_prefetch, units) if setting.placements.kept else len(units)
    tiers = tiered.bytes_on_tiers(units, setting, steps, states)
    device = tiers[Tier.DEVICE]
    return Estimate(
        parameters=device.parameters,
        gradients=device.gradients,
        optimizer=device.optimizer + device.buffers,
        unsharded=0,
        peak_unsharded=tiered.peak_unsharded_bytes(units, together),
        host=tiers[Tier.HOST].total,
        nvme=tiers[Tier.DISK].total,
        scales=scales,
        activations=usage.peak,
        wire_bytes_per_step=tiered.wire_bytes(units, setting, steps) + usage.sent * steps,
    )


def _checked_number(given: object) -> int:
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    raise ValueError(f"expected a model or a number of parameters, got {given!r}")


# ---------------------------------------------------------------------------------- the units of ranks


def setting_of(config: Config, world_size: int, *, host_computes: bool) -> Setting:
    """Return the setting of plans for a number of ranks. Raises ValueError for no multiple of the mesh.

    Args:
        config: the config.
        world_size: the ranks.
        host_computes: see `estimate`.
    """
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
