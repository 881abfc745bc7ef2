"""Bytes of a rank from the plans of its units: on each tier, gathered at the peak, and sent in a step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zeroshard.plan import pieces
from zeroshard.plan.buffers import BufferPlan, Setting, UnitPlan
from zeroshard.plan.exchange import Collective, Exchange
from zeroshard.plan.layout import MIN_8BIT_SIZE, num_blocks
from zeroshard.plan.placement import DP_SHARD, SUMMANDS
from zeroshard.plan.tiers import Tier
from zeroshard.tables import format_bytes


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of a rank by kind. The first five are on the device."""

    parameters: int
    """Main parameters, and replicated parameters in the compute dtype."""
    gradients: int
    """Gradients for the optimizer, and sums that are not reduced yet."""
    optimizer: int
    """Optimizer states, and the state of a gradient hook, such as errors."""
    unsharded: int
    """Full parameters that are gathered for a forward or backward only."""
    peak_unsharded: int
    """The largest `unsharded` since the engine was made or `reset_memory_report()`."""
    host: int = 0
    """Host memory for offloaded values, with the buffers that are kept for the next step."""
    pinned: int = 0
    """The part of `host` that is pinned."""
    nvme: int = 0
    """Values that are offloaded to NVMe."""
    averages: int = 0
    """Moving averages of parameters, on the device."""
    scales: int = 0
    """Scales and code tables of quantized weights, on the device; `parameters` has the codes."""
    peak_versions: int = 0
    """The most bytes of weights of other ages that an asynchronous pipeline holds in a batch."""

    @property
    def total(self) -> int:
        """Bytes on the device: parameters, scales, gradients, optimizer states, averages, and `unsharded`."""
        trained = self.gradients + self.optimizer + self.averages
        return self.parameters + self.scales + trained + self.unsharded


STATES = {
    "parameters": "parameters",
    "scales of codes": "scales",
    "gradients": "gradients",
    "optimizer states": "optimizer",
    "averages": "averages",
}
"""The fields of a report or an estimate by their names in a table."""


def byte_rows(reports: Collection[ModelStates], fields: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield a row of bytes, a cell for each report, for each field that one of them has."""
    for name, field in fields.items():
        counts = [getattr(report, field, None) for report in reports]
        if any(counts):
            yield name, *("-" if count is None else format_bytes(count) for count in counts)


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
    kinds = defaultdict[tuple[BufferPlan, ...], list[str]](list)  # alike units are counted once
    for unit in units:
        kinds[unit.buffers].append(unit.name)
    buffers = [(buffer, len(names)) for kind, names in kinds.items() for buffer in kind]
    return {
        tier: TierBytes(
            parameters=sum(times * parameter_bytes(buffer, tier) for buffer, times in buffers),
            gradients=_gradient_bytes(kinds, setting, num_micro_batches, tier),
            optimizer=_state_bytes([one for one in buffers if one[0].state_tier is tier], setting, states),
            buffers=_piece_bytes(kinds, setting, states, tier),
        )
        for tier in Tier
    }


_Kinds = Mapping[tuple[BufferPlan, ...], list[str]]
"""The names of units with the same buffers."""


def _gradient_bytes(kinds: _Kinds, setting: Setting, num: int, tier: Tier) -> int:
    is_early = bool(setting.steps_in_backward) and num == 1  # others than those of `train_batch` come, too

    def of_buffer(buffer: BufferPlan) -> int:
        comes_near = buffer.main_tier is not Tier.DEVICE and pieces.near_parts(buffer)
        if not is_early or setting.host is Tier.DEVICE or not comes_near:
            return gradient_bytes(buffer, setting, num, tier)
        # Gradients with which the device steps in the backward stay there.
        return gradient_bytes(buffer, setting, num, Tier.HOST) if tier is Tier.DEVICE else 0

    each = list[int]()
    for kind, names in kinds.items():
        each += [sum(map(of_buffer, kind))] * len(names)
    if not is_early:
        return sum(each)
    # Of the units that are stepped or wait for it, and of the unit that is reduced.
    num_units = 1 + (1 if setting.host is Tier.DEVICE else pieces.MOST_UNDER_WAY)
    return sum(sorted(each)[-num_units:])


def _piece_bytes(kinds: _Kinds, setting: Setting, states: States, tier: Tier) -> int:
    """Bytes of the pieces of memory on a tier through which values of farther tiers pass."""
    if tier is Tier.DISK or tier is Tier.DEVICE is setting.host:
        return 0
    parts, numbers = [], Counter[str]()
    travelling = ((k, b) for k in kinds for b in k if tier.distance < b.state_tier.distance)
    for kind, buffer in travelling:
        sizes, most = pieces.slice_sizes(buffer), pieces.most_elements(buffer)
        for indices in pieces.near_parts(buffer):
            numbers[max(kinds[kind])] += len(pieces.cut(sizes[indices[0]], most)) if len(indices) == 1 else 1
            together = [min(sizes[index], most) for index in indices]
            num_bytes = sum(map(partial(_bytes_of_a_step, buffer, setting, states), together, indices))
            # No rank has most of each parameter: all that it has is its shard.
            parts.append(num_bytes * min(sum(together), buffer.main_size) // max(1, sum(together)))
    largest = max(parts, default=0)
    num_ahead = max((num for unit, num in numbers.items() if unit), default=1) if states.num else 1
    return (pieces.NUM_OTHERS + pieces.most_ahead(num_ahead, largest)) * largest


def _bytes_of_a_step(buffer: BufferPlan, setting: Setting, states: States, num: int, index: int) -> int:
    """Bytes of some elements of a parameter, of their states, and of gradients that come from the host."""
    of_states: int = states.num * _bytes_of_a_state(buffer, num, buffer.layout.sizes[index], states)
    if buffer.main_tier is Tier.DEVICE:
        return of_states
    has_gradients = buffer.state_tier is Tier.HOST and not setting.steps_in_backward
    return of_states + num * buffer.main_dtype.itemsize * (1 + has_gradients)


def _state_bytes(buffers: Sequence[tuple[BufferPlan, int]], setting: Setting, states: States) -> int:
    """Optimizer states of the rank that holds most; each buffer is there so many times."""
    ranks = np.arange(setting.sizes[DP_SHARD])
    total = np.zeros_like(ranks)
    for buffer, times in buffers:
        size = buffer.layout.shard_size
        for index, whole in enumerate(buffer.layout.sizes) if buffer.trainable else ():
            span = buffer.layout.parameter(index)
            owned = np.minimum(span.stop, (ranks + 1) * size) - np.maximum(span.start, ranks * size)
            num = owned.clip(0) if buffer.is_partial else np.full_like(ranks, whole)
            total += times * _bytes_of_a_state(buffer, num, whole, states)
    return states.num * int(total.max())


def _bytes_of_a_state(buffer: BufferPlan, num: Any, whole: int, states: States) -> Any:
    """Bytes of one state for numbers of elements of a parameter that has `whole` elements."""
    if states.bits == 32:
        return num * buffer.wide_dtype.itemsize
    if whole < MIN_8BIT_SIZE:
        return num * _SCALE
    return num + num_blocks(num) * _SCALE


_SCALE = 4
"""Bytes of the scale of a block, and of a state that is not quantized: both are float32."""


# ------------------------------------------------------------------------ bytes of buffers, and on the wire


def parameter_bytes(buffer: BufferPlan, tier: Tier = Tier.DEVICE) -> int:
    """Bytes on a tier: main parameters, their copy, and unsharded parameters that are always there."""
    total = 0
    if tier is Tier.DEVICE and buffer.is_resident:
        total += buffer.layout.total * buffer.compute_dtype.itemsize
    if tier is buffer.main_tier and not buffer.is_alias:
        total += buffer.main_size * buffer.main_dtype.itemsize
    if tier is buffer.copy_tier and not buffer.is_resident:
        total += buffer.main_size * buffer.compute_dtype.itemsize
    return total


def gradient_bytes(
    buffer: BufferPlan, setting: Setting, num_micro_batches: int, tier: Tier = Tier.DEVICE
) -> int:
    """Bytes of gradients on a tier before an optimizer step: of one micro-batch, or of the sum of several.

    Gradients of the tier of files are in host memory. Sums in a wider dtype than main parameters have memory
    of their own there, because the device reads them while it writes the gradients that the optimizer reads.
    Where a micro-batch leaves parameters out, up to twice as much is there.
    """
    if not buffer.trainable:
        return 0
    place = setting.host if buffer.main_tier is Tier.DISK else buffer.main_tier
    of_one = buffer.main_size * buffer.main_dtype.itemsize if tier is place else 0
    if num_micro_batches == 1:
        return of_one
    if setting.placements.gradient == SUMMANDS and (buffer.reductions or place is Tier.DEVICE):
        of_sums = buffer.layout.total * buffer.wide_dtype.itemsize if tier is Tier.DEVICE else 0
        return of_sums if place is Tier.DEVICE else of_sums + of_one
    of_sums = buffer.main_size * buffer.wide_dtype.itemsize if tier is place else 0
    is_apart = tier is not Tier.DEVICE and buffer.main_dtype is not buffer.wide_dtype
    return of_sums + of_one if is_apart else of_sums


def peak_unsharded_bytes(units: Sequence[UnitPlan], num_together: int) -> int:
    """Bytes of gathered parameters at the peak: of the root, and of so many units one after the other.

    Args:
        units: the root first, then the others in the order of their forwards.
        num_together: units other than the root that are gathered at the same time.
    """
    root, *others = (
        sum(b.layout.total * b.compute_dtype.itemsize for b in unit.buffers if not b.is_resident)
        for unit in units
    )
    others = [size for size in others if size]  # the others are not gathered ahead
    windows = [sum(others[start : start + num_together]) for start in range(len(others))]
    return root + max(windows, default=0)


def wire_bytes(units: Sequence[UnitPlan], setting: Setting, num_micro_batches: int) -> int:
    """Bytes that a rank sends in an optimizer step.

    Args:
        units: the root first, then the others in the order of their forwards.
        setting: the setting of the plans.
        num_micro_batches: micro-batches in a step.
    """
    total, last = 0, len(units) - 1
    num_reductions = 1 if setting.placements.gradient == SUMMANDS else num_micro_batches
    kinds = Counter(
        (buffer, unit.is_kept(setting.placements, is_root=number == 0, ends_forward=number == last))
        for number, unit in enumerate(units)
        for buffer in unit.buffers
    )
    for (buffer, is_kept), times in kinds.items():
        compute, size = buffer.compute_dtype.itemsize, buffer.layout.total
        num_gathers = 1 if buffer.is_resident else num_micro_batches
        for path in (buffer.gathers, () if is_kept else buffer.regathers):
            total += times * num_gathers * bytes_sent(path, size, setting.sizes, compute)
        wire = buffer.reduce_dtype.itemsize, buffer.wide_dtype.itemsize
        total += times * num_reductions * bytes_sent(buffer.reductions, size, setting.sizes, *wire)
    return total


def bytes_sent(path: Sequence[Exchange], num: int, sizes: Mapping[str, int], *itemsizes: int) -> int:
    """Add up the bytes that a rank sends on a path.

    Args:
        path: as `exchanges` gives it.
        num: elements of the whole tensor.
        sizes: the number of ranks of each axis.
        itemsizes: bytes of an element in the first exchange, the second one, ...; the last holds for all
            that follow.
    """
    total, held = 0, num
    if path and path[0].collective is Collective.ALL_GATHER:
        held //= math.prod(sizes[axis] for _, axis in path)
    for number, (collective, axis) in enumerate(path):
        itemsize = itemsizes[min(number, len(itemsizes) - 1)]
        if collective is Collective.ALL_GATHER:
            held *= sizes[axis]
        total += held * itemsize * (sizes[axis] - 1) // sizes[axis]
        if collective is Collective.REDUCE_SCATTER:
            held //= sizes[axis]
    return total
