"""The parts of a tensor that ranks hold, and the whole made of all parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm.collectives import Axis
from zeroshard.plan.cuts import Cut
from zeroshard.plan.layout import Span
from zeroshard.plan.originals import Original


def part_of(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """Return a rank's part of a tensor, [*cut.local_shape]: a copy, or a view where it is one range."""
    parts = [whole.narrow(cut.dim, span.start, span.size) for span in cut.spans(rank)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)


def whole_of(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """Return the tensor whose parts the ranks hold, in rank order: [*cut.shape]."""
    whole = parts[0].new_empty(cut.shape)
    for rank, part in enumerate(parts):
        for own, span in cut.placed(rank, Span(0, part.shape[cut.dim])):
            whole.narrow(cut.dim, span.start, span.size).copy_(part.narrow(cut.dim, own.start, own.size))
    return whole


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


def gather_ranges(axis: Axis, own: Tensor, sizes: Sequence[int], tag: int, what: str) -> Tensor:
    """Return the ranges of all ranks one after another: [sum(sizes)]; collective.

    Args:
        own: [sizes[axis.rank]], on the device of the axis.
        tag: as `Axis.all_gather` has it.
        what: the name of the tensor, for errors.
    """
    longest = max(sizes)
    piece, pieces = own.new_zeros(longest), own.new_empty(axis.size * longest)
    piece[: own.numel()].copy_(own)
    raw = pieces.view(torch.uint8), piece.view(torch.uint8)  # Gloo knows few dtypes
    axis.all_gather(*raw, tag=tag, label=f"all-gather of {what}").wait()
    return torch.cat([pieces[rank * longest :][:size] for rank, size in enumerate(sizes)])
