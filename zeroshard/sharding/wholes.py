"""Whole parameters, as the model had them, of which the ranks of a tensor group may hold parts."""

from __future__ import annotations

from torch import Tensor

from zeroshard.comm.collectives import Axis
from zeroshard.parameters.parts import part_of, whole_of
from zeroshard.plan.originals import Original
from zeroshard.sharding.buffer import FlatBuffer


def gather_wholes(buffer: FlatBuffer, tp: Axis) -> list[Tensor]:
    """Gather the main parameters of a buffer, whole, in memory of their own; collective."""
    return wholes_in(buffer, buffer.gather_main(), tp)


def wholes_in(buffer: FlatBuffer, flat: Tensor, tp: Axis) -> list[Tensor]:
    """Gather tensors over the tensor ranks, from a flat range with the parts of this rank; collective.

    Args:
        buffer: it has the places in the range.
        flat: [total]
        tp: the tensor ranks.

    Returns:
        A tensor for each parameter: a view of `flat` where each rank holds all of it.
    """
    pairs = zip(buffer.main_views(flat), buffer.originals, strict=True)
    return [whole_value(view, original, tp) for view, original in pairs]


def whole_value(own: Tensor, original: Original, tp: Axis) -> Tensor:
    """Return the tensor of which the tensor ranks hold parts, of the original shape; collective."""
    if original.cut is None:
        return own
    flat = own.new_empty(tp.size * own.numel())
    tp.all_gather(flat, own.reshape(-1), tag=0, label=f"all-gather of the parts of '{original.fqn}'").wait()
    return whole_of(flat.view(tp.size, *own.shape).unbind(), original.cut)


def own_value(whole: Tensor, original: Original, tp: Axis) -> Tensor:
    """Return this rank's part of a tensor of the original shape."""
    return whole if original.cut is None else part_of(whole, original.cut, tp.rank)
