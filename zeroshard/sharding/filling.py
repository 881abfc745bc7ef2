"""The first values of a flat buffer: those of rank 0, or those that each rank reads from a file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.lazy.deferred import has_memory, read_part, values_of
from zeroshard.parameters.parts import part_of
from zeroshard.plan.buffers import BufferPlan
from zeroshard.plan.layout import Span
from zeroshard.plan.originals import Original
from zeroshard.sharding.context import Context


def take_over(
    plan: BufferPlan, originals: Sequence[Original], own: Span, context: Context, what: str
) -> tuple[Tensor, Tensor]:
    """Make `full` and `main` of a buffer with rank 0's values; padding is zero; the originals are emptied.

    Args:
        plan: the plan of the buffer.
        originals: its parameters.
        own: the flat range that `main` holds.
        context: the objects that all buffers share.
        what: the name of the unit, for errors.
    """
    values = torch.zeros(plan.layout.total, dtype=plan.main_dtype, device=context.device)
    for index, original in enumerate(originals):
        data = original.parameter.detach()
        if context.axes.tp.size > 1:
            _take_part(values[plan.layout.parameter(index).slice], original, context)
        elif has_memory(data) or context.axes.dp.rank == 0:  # others need no deferred values
            values[plan.layout.parameter(index).slice].copy_(values_of(data).reshape(-1))
        original.parameter.data = data.new_empty(0)
    context.axes.dp.broadcast(values, f"first broadcast of {what}")
    main = values[own.slice]
    full = values.to(plan.compute_dtype)
    return full, main if plan.is_alias else _empty_main(plan, own, context).copy_(main)


def _take_part(target: Tensor, original: Original, context: Context) -> None:
    """Write this rank's part of the values that the first of its tensor ranks has.

    The parts of the first data-parallel ranks are those that count, but all ranks issue the same collectives.
    """
    axes, data = context.axes, original.parameter.detach()
    has_values = has_memory(data) or axes.dp.rank == 0
    if axes.tp.rank == 0 and has_values:
        whole = values_of(data).reshape(-1).to(context.device)
    else:
        whole = torch.empty(data.numel(), dtype=data.dtype, device=context.device)
    axes.tp.broadcast(whole, f"first broadcast of '{original.fqn}' over the tensor ranks")
    if original.cut is not None:
        whole = part_of(whole.view(original.cut.shape), original.cut, axes.tp.rank).reshape(-1)
    target.copy_(whole)


def read(
    plan: BufferPlan, originals: Sequence[Original], own: Span, context: Context
) -> tuple[Tensor, Tensor]:
    """Make the same with stored values: each rank reads the part that it keeps, a parameter at a time."""
    # A `full` that is freed at once is never written: on a CPU it takes no memory at all.
    make = torch.zeros if plan.is_resident else torch.empty
    full = make(plan.layout.total, dtype=plan.compute_dtype, device=context.device)
    main = full[own.slice]
    if not plan.is_alias:
        main = _empty_main(plan, own, context).zero_()
        context.memory.rest(main)
    kept = Span(0, plan.layout.total) if plan.is_resident else own
    for index, original in enumerate(originals):
        whole = plan.layout.parameter(index)
        place = whole.intersect(kept)
        if place.size:
            inside = place.shifted(-whole.start)
            runs = (inside,) if original.cut is None else original.cut.runs(context.axes.tp.rank, inside)
            data = read_part(original.parameter, *runs)
            if plan.main_dtype.itemsize < plan.compute_dtype.itemsize:
                data = data.to(plan.main_dtype)  # gathered values will have this precision
            if plan.is_resident:
                full[place.slice].copy_(data)
            if not plan.is_alias:
                part = place.intersect(own)
                main[part.shifted(-own.start).slice].copy_(data[part.shifted(-place.start).slice])
        original.parameter.data = original.parameter.new_empty(0)
        context.memory.rest(main)
    return full, main


def _empty_main(plan: BufferPlan, own: Span, context: Context) -> Tensor:
    return context.memory.empty(own.size, plan.main_dtype, plan.main_tier)
