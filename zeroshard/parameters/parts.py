"""The part of a tensor that a rank of a tensor group holds, and the whole made of all parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.plan.cuts import Cut


class Known(Protocol):
    """The facts that a sharded parameter knows of the original."""

    full_shape: torch.Size
    cut: Cut | None


def num_elements(parameter: Known) -> int:
    """Return the elements of the original parameter, over all ranks."""
    return parameter.full_shape.numel() if parameter.cut is None else math.prod(parameter.cut.shape)


def part_of(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """Return a rank's part of a tensor, [*cut.local_shape]: a copy, or a view where it is one range."""
    parts = [whole.narrow(cut.dim, span.start, span.size) for span in cut.spans(rank)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)


def whole_of(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """Return the tensor whose parts the ranks hold, in rank order: [*cut.shape]."""
    whole = parts[0].new_empty(cut.shape)
    for rank, part in enumerate(parts):
        start = 0
        for span in cut.spans(rank):
            whole.narrow(cut.dim, span.start, span.size).copy_(part.narrow(cut.dim, start, span.size))
            start += span.size
    return whole
