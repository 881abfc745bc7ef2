"""Bytes of planned units: those that a rank holds at rest, gathers at the peak, and sends in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zeroshard.plan.buffers import BufferPlan, Setting, UnitPlan
from zeroshard.plan.exchange import Collective, Exchange
from zeroshard.plan.placement import SUMMANDS
from zeroshard.plan.tiers import Tier


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


def unsharded_bytes(unit: UnitPlan) -> int:
    """Bytes that a gathered unit takes beyond its bytes at rest."""
    freed = (buffer for buffer in unit.buffers if not buffer.is_resident)
    return sum(buffer.layout.total * buffer.compute_dtype.itemsize for buffer in freed)


def peak_unsharded_bytes(units: Sequence[UnitPlan], num_together: int) -> int:
    """Bytes of gathered parameters at the peak: of the root, and of so many units one after the other.

    Args:
        units: the root first, then the others in the order of their forwards.
        num_together: units other than the root that are gathered at the same time.
    """
    root, *others = map(unsharded_bytes, units)
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
    total = 0
    num_reductions = 1 if setting.placements.gradient == SUMMANDS else num_micro_batches
    for number, unit in enumerate(units):
        is_kept = unit.is_kept(setting.placements, is_root=number == 0, ends_forward=number == len(units) - 1)
        for buffer in unit.buffers:
            compute, size = buffer.compute_dtype.itemsize, buffer.layout.total
            num_gathers = 1 if buffer.is_resident else num_micro_batches
            for path in (buffer.gathers, () if is_kept else buffer.regathers):
                total += num_gathers * bytes_sent(path, size, setting.sizes, compute)
            wire = buffer.reduce_dtype.itemsize, buffer.wide_dtype.itemsize
            total += num_reductions * bytes_sent(buffer.reductions, size, setting.sizes, *wire)
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
