"""Bytes of a rank on each tier, from the plans of its units."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.assemble import read_setting
from zeroshard.comm.collectives import on_all
from zeroshard.comm.mesh import Axes
from zeroshard.comm.streams import has_streams
from zeroshard.config.sections import Config
from zeroshard.memory import traffic
from zeroshard.memory.budget import check_budget
from zeroshard.optim.adopted import num_bits, rule_of
from zeroshard.optim.eightbit.blocks import MIN_8BIT_SIZE, num_blocks
from zeroshard.plan import pieces
from zeroshard.plan.buffers import BufferPlan, Setting, UnitPlan, plan_units
from zeroshard.plan.placement import DP_SHARD
from zeroshard.plan.tiers import Tier
from zeroshard.plan.units import UnitSpec
from zeroshard.stepping.early import MOST_UNDER_WAY
from zeroshard.stepping.parts import is_known
from zeroshard.stores.pieces import NUM_OTHERS, most_ahead


@dataclass(frozen=True, slots=True)
class States:
    """The states of an optimizer for each element of a trained parameter."""

    num: int = 2
    """Tensors of states; the tensors of Adam are exp_avg and exp_avg_sq."""
    bits: int = 32
    """32 for the main dtype, at least float32; 8 for codes and their scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """Bytes of a rank on one tier, by kind."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0
    """Pieces of memory through which values of farther tiers pass."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def bytes_on_tiers(
    units: Sequence[UnitPlan], setting: Setting, num_micro_batches: int, states: States
) -> dict[Tier, TierBytes]:
    """Return the bytes on each tier between a backward and its step.

    Args:
        units: the plans of all units.
        setting: the setting of the plans.
        num_micro_batches: micro-batches in a step.
        states: the states of the optimizer; counted without padding, on the rank that holds most.
    """
    buffers = [buffer for unit in units for buffer in unit.buffers]
    return {
        tier: TierBytes(
            parameters=sum(traffic.parameter_bytes(buffer, tier) for buffer in buffers),
            gradients=_gradient_bytes(units, setting, num_micro_batches, tier),
            optimizer=_state_bytes((b for b in buffers if b.state_tier is tier), setting, states),
            buffers=_piece_bytes(units, setting, states, tier),
        )
        for tier in Tier
    }


def _gradient_bytes(units: Sequence[UnitPlan], setting: Setting, num: int, tier: Tier) -> int:
    is_early = bool(setting.steps_in_backward) and num == 1  # others than those of `train_batch` come, too
    each = [
        sum(_bytes_of_gradients(b, setting, num, tier, is_early=is_early) for b in u.buffers) for u in units
    ]
    if not is_early:
        return sum(each)
    # Of the units that are stepped or wait for it, and of the unit that is reduced.
    num_units = 1 + (1 if setting.host is Tier.DEVICE else MOST_UNDER_WAY)
    return sum(sorted(each)[-num_units:])


def _bytes_of_gradients(buffer: BufferPlan, setting: Setting, num: int, tier: Tier, *, is_early: bool) -> int:
    """Bytes on a tier; gradients with which the device steps in the backward stay there."""
    comes_near = buffer.main_tier is not Tier.DEVICE and pieces.near_parts(buffer)
    if not is_early or setting.host is Tier.DEVICE or not comes_near:
        return traffic.gradient_bytes(buffer, setting, num, tier)
    return traffic.gradient_bytes(buffer, setting, num, Tier.HOST) if tier is Tier.DEVICE else 0


def _piece_bytes(units: Sequence[UnitPlan], setting: Setting, states: States, tier: Tier) -> int:
    """Bytes of the pieces of memory on a tier through which values of farther tiers pass."""
    if tier is Tier.DISK or tier is Tier.DEVICE is setting.host:
        return 0
    parts, numbers = [], Counter[str]()
    travelling = ((u, b) for u in units for b in u.buffers if tier.distance < b.state_tier.distance)
    for unit, buffer in travelling:
        sizes, most = pieces.slice_sizes(buffer), pieces.most_elements(buffer)
        for indices in pieces.near_parts(buffer):
            numbers[unit.name] += len(pieces.cut(sizes[indices[0]], most)) if len(indices) == 1 else 1
            together = [min(sizes[index], most) for index in indices]
            num_bytes = sum(map(partial(_bytes_of_a_step, buffer, setting, states), together, indices))
            # No rank has most of each parameter: all that it has is its shard.
            parts.append(num_bytes * min(sum(together), buffer.main_size) // max(1, sum(together)))
    largest = max(parts, default=0)
    num_ahead = max((num for unit, num in numbers.items() if unit), default=1) if states.num else 1
    return (NUM_OTHERS + most_ahead(num_ahead, largest)) * largest


def _bytes_of_a_step(buffer: BufferPlan, setting: Setting, states: States, num: int, index: int) -> int:
    """Bytes of some elements of a parameter, of their states, and of gradients that come from the host."""
    of_states: int = states.num * _bytes_of_a_state(buffer, num, buffer.layout.sizes[index], states)
    if buffer.main_tier is Tier.DEVICE:
        return of_states
    has_gradients = buffer.state_tier is Tier.HOST and not setting.steps_in_backward
    return of_states + num * buffer.main_dtype.itemsize * (1 + has_gradients)


def _state_bytes(buffers: Iterable[BufferPlan], setting: Setting, states: States) -> int:
    """Optimizer states of the rank that holds most."""
    ranks = np.arange(setting.sizes[DP_SHARD])
    total = np.zeros_like(ranks)
    for buffer in buffers:
        size = buffer.layout.shard_size
        for index, whole in enumerate(buffer.layout.sizes) if buffer.trainable else ():
            span = buffer.layout.parameter(index)
            owned = np.minimum(span.stop, (ranks + 1) * size) - np.maximum(span.start, ranks * size)
            num = owned.clip(0) if buffer.is_partial else np.full_like(ranks, whole)
            total += _bytes_of_a_state(buffer, num, whole, states)
    return states.num * int(total.max())


def _bytes_of_a_state(buffer: BufferPlan, num: Any, whole: int, states: States) -> Any:
    """Bytes of one state for numbers of elements of a parameter that has `whole` elements."""
    if states.bits == 32:
        return num * buffer.wide_dtype.itemsize
    if whole < MIN_8BIT_SIZE:
        return num * torch.float32.itemsize
    return num + num_blocks(num) * torch.float32.itemsize


# ----------------------------------------------------------------------------------- the check of a node


def check_room(
    specs: Sequence[UnitSpec], config: Config, axes: Axes, optimizer: Optimizer | None, device: torch.device
) -> None:
    """Refuse an offload for which the node of some rank has no room, on all ranks; collective.

    Call it before a rank allocates.

    Args:
        specs: the units of the model.
        config: the config of the job.
        axes: the axes of the job.
        optimizer: the optimizer, over the original parameters.
        device: the device that computes.

    Raises:
        ValueError: a folder is not there.
        RuntimeError: the node has less; the message has the bytes of each kind, and says what needs less.
    """
    if config.offload.optimizer == config.offload.parameters == "none":
        return
    by_parts = optimizer is not None and is_known(optimizer)
    host_computes = not has_streams(device)
    setting = read_setting(config, axes.sizes, host_computes=host_computes, steps_by_parts=by_parts)

    def check() -> None:
        num, states = config.gradient_accumulation_steps, _states_of(optimizer)
        tiers = bytes_on_tiers(plan_units(specs, setting), setting, num, states)
        host, disk = tiers[Tier.HOST], tiers[Tier.DISK].total
        needed = {
            "main parameters and copies of them": host.parameters,
            "gradients": host.gradients,
            "optimizer states": host.optimizer,
            "buffers for the units in files": host.buffers,
        }
        needed = {kind: num_bytes for kind, num_bytes in needed.items() if num_bytes}
        folders = (config.offload.nvme_path or "").split(":") if disk else []
        if needed or disk:  # a launcher that does not tell the ranks on this node has all of them there
            check_budget(needed, disk, folders, int(os.environ.get("LOCAL_WORLD_SIZE", axes.world.size)))

    on_all(axes.world, "check of the room for offload", check)


def _states_of(optimizer: Optimizer | None) -> States:
    """Return the states of an optimizer; none for one that is not known, as nobody can count them."""
    rule = None if optimizer is None else rule_of(optimizer)
    if optimizer is None or rule is None:
        return States(num=0)
    largest = max((p for group in optimizer.param_groups for p in group["params"]), key=Tensor.numel)
    return States(num=len(rule.states), bits=num_bits(optimizer, largest))
