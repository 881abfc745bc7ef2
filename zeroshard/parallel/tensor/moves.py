"""The steps of activations between layers that are divided over the tensor ranks, with their backward.

A tensor is, over these ranks, the same on each (whole), a part of a dimension on each (part), or a summand on
each. A move leads from one to another. Its backward leads the gradient the opposite way:

    move               forward            backward of the gradient
    COPY               whole              a summand on each: sum
    SUM                summands: sum      whole
    GATHER             parts: gather      whole: split
    SPLIT              whole: split       parts: gather
    GATHER_SUMMANDS    parts: gather      a summand on each: sum and split
    SUM_TO_PARTS       sum and split      parts: gather

COPY and SUM stand around a pair of layers, the first one divided by its columns, the second one by its rows
(Shoeybi et al. 2019, "Megatron-LM", section 3: f and g). The last two take their place where the regions
between such pairs are divided along the sequence (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroshard.comm.activations import Activations


class Comm(Enum):
    """The moves: (way of a tensor in the forward, way of its gradient in the backward)."""

    COPY = ("keep", "sum")
    SUM = ("sum", "keep")
    GATHER = ("gather", "split")
    SPLIT = ("split", "gather")
    GATHER_SUMMANDS = ("gather", "sum and split")
    SUM_TO_PARTS = ("sum and split", "gather")


_WAYS: dict[str, Callable[[Tensor, Activations, int, str], Tensor]] = {
    "keep": lambda value, over, dim, label: value.view_as(value),
    "sum": lambda value, over, dim, label: over.sum(value, label),
    "gather": lambda value, over, dim, label: over.gather(value, dim, label),
    "split": lambda value, over, dim, label: over.split(value, dim),
    "sum and split": lambda value, over, dim, label: over.scatter(value, dim, label),
}


def move(value: Tensor, how: Comm, over: Activations, label: str, dim: int = -1) -> Tensor:
    """Move a tensor over the tensor ranks.

    Args:
        value: the tensor; the same shape and dtype on all ranks.
        how: the move.
        over: the exchanges of the tensor ranks.
        label: the name of the layer, for messages.
        dim: the dimension of the parts.

    Raises:
        ValueError: the ranks do not divide the dimension.
    """
    if over.size == 1:
        return value
    moved: Tensor = _Moved.apply(value, how, over, label, dim)
    return moved


Sum = Callable[[Tensor, Activations, str], Tensor]
"""(summand, exchanges, name of the layer) -> the sum over the tensor ranks, or a part of it."""


def add_up(value: Tensor, over: Activations, label: str) -> Tensor:
    """Return the sum over the tensor ranks."""
    return move(value, Comm.SUM, over, label)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, how: Comm, over: Activations, label: str, dim: int) -> Tensor:
        ctx.how, ctx.over, ctx.label, ctx.dim = how, over, label, dim
        there, _ = how.value
        moved = _WAYS[there](value, over, dim, f"{there} of activations of {label}")
        # Autograd refuses to add to a view in place, as some models do. A kept or split value shares memory.
        return moved if there in ("keep", "split") else moved.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, back = ctx.how.value
        label = f"{back} of gradients of activations of {ctx.label}"
        return _WAYS[back](gradient, ctx.over, ctx.dim, label), None, None, None, None
