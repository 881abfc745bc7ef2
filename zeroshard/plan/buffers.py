"""Units and their flat buffers as plain values, made before any memory is.

Buffers and estimates read these plans: the consequences of a stage, a precision and a mesh are written here
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from zeroshard.config.dtypes import widened
from zeroshard.config.pipeline import NEWEST_WEIGHTS
from zeroshard.plan.exchange import Exchange, exchanges
from zeroshard.plan.layout import Layout, Span
from zeroshard.plan.originals import Original, computes_in_own_dtype, is_packed, is_table
from zeroshard.plan.placement import DP_REPLICATE, DP_SHARD, TP, Placement, Placements, place
from zeroshard.plan.tiers import Tier, Tiers

if TYPE_CHECKING:
    import torch

    from zeroshard.config.sections import Config
    from zeroshard.plan.units import UnitSpec


_MOST_AHEAD, _ELEMENTS_AHEAD = 8, 1 << 18
"""The most small units that are gathered ahead, and the most elements that they have together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePolicy:
    """The dtypes that the user asked for. Each field says what None means."""

    param_dtype: torch.dtype | None
    """The dtype of forward and backward; None: each parameter's own."""
    reduce_dtype: torch.dtype | None
    """The dtype of gradients on the wire; None: the compute dtype, but at least float32."""
    main_dtype: torch.dtype | None
    """The dtype of main parameters; None: the given dtype, but at least float32. Frozen ones need none."""

    def of(self, original: Original) -> DtypePolicy:
        """The policy for one parameter. Codes keep their dtype; BatchNorm wants its statistics' dtype."""
        asked = original.compute_dtype
        if is_packed(original.parameter) or (
            asked is None and any(computes_in_own_dtype(module) for module, _ in original.owners)
        ):
            return replace(self, param_dtype=None)
        return self if asked is None else replace(self, param_dtype=asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The inputs of a plan other than the parameters."""

    placements: Placements
    dtypes: DtypePolicy
    sizes: Mapping[str, int]
    """The number of ranks of each axis of the mesh."""
    tiers: Tiers = Tiers()  # noqa: RUF009 - it is frozen
    device_fraction: float = 0.0
    """The share of what is offloaded that stays on the device, 0 to 1; see `tiers_of_units`."""
    host: Tier = Tier.HOST
    """The tier of host memory; for ranks on the CPU, it is the device."""
    steps_in_backward: bool | None = False
    """True if units step during the backward; None: only in that of `train_batch`."""
    steps_by_parts: bool = False
    """True if the optimizer may step some parameters after others, so that states can travel part by part."""
    weights: str = "latest"
    """The values that forwards and backwards compute with, by their name in `config.pipeline.WEIGHTS`. With
    others than the newest, trained parameters are gathered or copied before each forward and backward, at all
    stages, and freed after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """One flat buffer: the parameters of a unit with one dtype and one `requires_grad`."""

    layout: Layout
    trainable: bool
    compute_dtype: torch.dtype
    """The dtype of the unsharded parameters."""
    main_dtype: torch.dtype
    """The dtype of the main parameters and of the gradients that the optimizer reads."""
    reduce_dtype: torch.dtype
    """The dtype of gradients on the wire."""
    is_resident: bool
    """True if the unsharded parameters are there all the time."""
    is_partial: bool
    """True if a rank holds only its shard of the main parameters."""
    is_packed: bool
    """True if its elements are codes, which are never cast."""
    gathers: tuple[Exchange, ...]
    """The exchanges from main parameters to unsharded ones."""
    regathers: tuple[Exchange, ...]
    """The exchanges of a gather in backward, from the values that are kept after forward."""
    reductions: tuple[Exchange, ...]
    """The exchanges from autograd's gradients to the optimizer's; none for frozen parameters."""
    main_tier: Tier
    """The tier of the main parameters, and of the gradients that the optimizer reads."""
    state_tier: Tier
    """The tier of the optimizer's states."""
    copy_tier: Tier | None
    """The tier of a copy of the main parameters in the compute dtype, from which gathers start; None if they
    start from the main parameters. Of resident parameters the copy is a part."""

    @property
    def wide_dtype(self) -> torch.dtype:
        """The main dtype, at least float32, but for codes; optimizer states, updates and sums have it."""
        return self.main_dtype if self.is_packed else widened(self.main_dtype)

    @property
    def travels(self) -> bool:
        """True if its optimizer states rest elsewhere than on the device that computes."""
        return self.state_tier is not Tier.DEVICE

    @property
    def is_alias(self) -> bool:
        """True if the main parameters are a view of the unsharded ones."""
        is_near = self.main_tier is Tier.DEVICE
        return self.is_resident and is_near and self.main_dtype == self.compute_dtype

    @property
    def main_size(self) -> int:
        """Elements of a rank's main parameters, padding included."""
        return self.layout.shard_size if self.is_partial else self.layout.total

    def main_span(self, rank: int) -> Span:
        """The flat range of the main parameters of a rank of the shard group."""
        return self.layout.shard(rank) if self.is_partial else Span(0, self.layout.total)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A unit: its buffers, and its needs in backward."""

    name: str
    buffers: tuple[BufferPlan, ...]
    needs_parameters_in_backward: bool = True
    """False if autograd saves no parameter of the unit."""
    reason: str = ""
    """The reason why its module is a unit, for people."""

    @property
    def is_resident(self) -> bool:
        """True if no parameter of it is ever freed."""
        return all(buffer.is_resident for buffer in self.buffers)

    @property
    def needs_turns(self) -> bool:
        """True if something of it is freed, exchanged or copied to another tier, or there is nothing."""
        kept = (buffer.is_resident and buffer.main_tier is Tier.DEVICE for buffer in self.buffers)
        exchanges = (buffer.gathers or buffer.reductions for buffer in self.buffers)
        return not (self.buffers and all(kept)) or any(exchanges)

    @property
    def numel(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(buffer.layout.total for buffer in self.buffers)

    def is_kept(self, placements: Placements, *, is_root: bool, ends_forward: bool) -> bool:
        """True if backward needs no second gather of the unit.

        Args:
            placements: the row of the stage.
            is_root: True for the root, whose backward begins as its forward ends.
            ends_forward: True for a unit after which no other one runs in the forward.
        """
        is_needed = self.needs_parameters_in_backward and not self.is_resident
        return is_root or ends_forward or not is_needed or not placements.kept


def units_ahead(asked: int | None, units: Sequence[UnitPlan]) -> int:
    """Return the number of units whose gathers, and whose reductions, may be under way at a time.

    Args:
        asked: the number of the config; None: one, or several small ones, for which latency counts.
        units: the plans of all units, the root first.
    """
    largest = max((unit.numel for unit in units[1:]), default=0)
    return max(1, min(_MOST_AHEAD, _ELEMENTS_AHEAD // max(1, largest))) if asked is None else asked


def read_setting(
    config: Config, sizes: Mapping[str, int], *, host_computes: bool = False, steps_by_parts: bool = False
) -> Setting:
    """Return the inputs of plans other than the parameters.

    Args:
        config: the config as it was given.
        sizes: the number of ranks of each axis.
        host_computes: True for ranks on the CPU, whose device is host memory.
        steps_by_parts: True if the optimizer may step some parameters after others.
    """
    precision, offload = config.precision, config.offload
    tiers = Tiers.of(offload.optimizer, offload.parameters, host_computes=host_computes)
    travels = tiers.optimizer is not Tier.DEVICE
    return Setting(
        placements=place(config.stage, config.reshard_after_forward, sizes[DP_SHARD]),
        dtypes=DtypePolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            main_dtype=precision.main_dtype,
        ),
        sizes=sizes,
        tiers=tiers,
        device_fraction=offload.device_fraction,
        host=Tier.DEVICE if host_computes else Tier.HOST,
        steps_in_backward=config.steps_in_backward if travels else offload.step_in_backward or False,
        steps_by_parts=steps_by_parts,
        weights=config.pipeline.chosen_weights,
    )


def lie_in_files(plans: Iterable[BufferPlan]) -> bool:
    """True if optimizer states of any of these buffers rest in files."""
    return any(plan.state_tier is Tier.DISK for plan in plans)


def plan_units(specs: Iterable[UnitSpec], setting: Setting) -> list[UnitPlan]:
    """Plan the units of a model, in the order of their specifications; see `group` for their buffers."""
    specs = list(specs)
    sizes = [sum(o.numel for o in spec.originals) for spec in specs]
    trained = [sum(o.numel for o in spec.originals if o.parameter.requires_grad) for spec in specs]
    plans = []
    for spec, tiers in zip(specs, tiers_of_units(sizes, trained, setting), strict=True):
        own = replace(setting, tiers=tiers)
        buffers = tuple(plan_buffer(originals, own) for originals in group(spec.originals, setting.dtypes))
        plans.append(UnitPlan(spec.name, buffers, not is_table(spec.module), spec.reason))
    return plans


def tiers_of_units(sizes: Sequence[int], trained: Sequence[int], setting: Setting) -> list[Tiers]:
    """Return the tiers of each unit, of which a share of all that is offloaded stays on the device.

    Parameters stay first, which would travel twice a step, then optimizer states. They are those of the first
    units of the forward: their states come first in a step that waits for forwards, and last in the backward.

    Args:
        sizes: the elements of each unit, in the order of forwards.
        trained: those of them that are trained.
        setting: the setting; its `device_fraction` is the share.
    """
    own = setting.tiers
    moves = [tier is not Tier.DEVICE for tier in (own.parameters, own.optimizer)]
    share = setting.device_fraction * sum(moves)
    near_parameters = _first_units(sizes, min(share, moves[0]))
    near_states = _first_units(trained, share - min(share, moves[0]))
    return [
        Tiers(Tier.DEVICE if states else own.optimizer, Tier.DEVICE if parameters else own.parameters)
        for states, parameters in zip(near_states, near_parameters, strict=True)
    ]


def _first_units(sizes: Sequence[int], share: float) -> list[bool]:
    """True for the first units that fit into a share of all elements, even if they have none."""
    left = share * sum(sizes)
    return [bool(share) and so_far <= left for so_far in accumulate(sizes)]


def group(originals: Iterable[Original], dtypes: DtypePolicy) -> list[list[Original]]:
    """Divide the parameters of a unit by what the parameters of a buffer have in common."""
    groups: dict[tuple[object, ...], list[Original]] = {}
    for original in originals:
        parameter = original.parameter
        compute = dtypes.of(original).param_dtype
        # A parameter of several pipeline ranks lies alone, so that its slices are the same on all of these:
        # the order of modules, and their units, may differ.
        shared = original.holders and original.fqn
        placing = tuple(original.summands), original.placements is None
        key = (parameter.dtype, parameter.requires_grad, compute, is_packed(parameter), placing, shared)
        groups.setdefault(key, []).append(original)
    return list(groups.values())


def plan_buffer(originals: Sequence[Original], setting: Setting) -> BufferPlan:
    """Apply a stage, a precision and a mesh to parameters of one `group`."""
    first, dtypes = originals[0].parameter, setting.dtypes.of(originals[0])
    placements, sizes = originals[0].placements or setting.placements, setting.sizes
    summands = originals[0].summands
    compute = dtypes.param_dtype or first.dtype
    wide = widened(first.dtype)
    main = (dtypes.main_dtype or wide) if first.requires_grad else compute
    main_place = placements.optimizer if first.requires_grad else placements.parameter
    gathers = exchanges(main_place, {}, sizes)
    is_sharded, tiers = bool(placements.parameter), setting.tiers
    far = tiers.parameters if is_sharded else Tier.DEVICE
    state_tier = tiers.optimizer if first.requires_grad else far
    computes = main == compute and far is Tier.DEVICE
    stays = computes and state_tier is not Tier.DEVICE and setting.steps_by_parts
    main_tier = Tier.DEVICE if stays else state_tier
    # A device casts main parameters that are as near as the sharded ones; the host would for each gather.
    is_cast = far is not Tier.DEVICE and main_tier is far and main != compute
    is_freed = is_sharded and (bool(gathers) or far is not Tier.DEVICE)
    has_versions = setting.weights not in NEWEST_WEIGHTS and first.requires_grad
    num_replicas = sizes[DP_REPLICATE] * (sizes[TP] if TP in summands else 1)
    return BufferPlan(
        layout=Layout(tuple(original.numel for original in originals), sizes[DP_SHARD], num_replicas),
        trainable=first.requires_grad,
        compute_dtype=compute,
        main_dtype=main,
        reduce_dtype=dtypes.reduce_dtype or widened(compute),
        is_resident=not (is_freed or has_versions),
        is_partial=sizes[DP_SHARD] > 1 and main_place.get(DP_SHARD) is Placement.SHARD,
        is_packed=is_packed(first),
        gathers=gathers,
        regathers=gathers if has_versions else exchanges(placements.kept, {}, sizes) if is_freed else (),
        reductions=exchanges(summands, placements.optimizer, sizes) if first.requires_grad else (),
        main_tier=main_tier,
        state_tier=state_tier,
        copy_tier=far if is_cast or main_tier.distance > far.distance else None,
    )
