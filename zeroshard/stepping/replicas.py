"""Losses, and gradients of parameters that each tensor rank holds whole: a check that all have the same.

It is made at steps 1, 2, 4, 8 and so on.

Tensor ranks compute the same values between divided layers, so they step these parameters alike and exchange
nothing for them. If they were given other batches, drew another dropout, or use such a parameter for a part
of the heads only, the parameters would drift apart, and no error would tell. A loss of values that are parts,
as of a last layer that stays divided, is another one on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.runtime import Runtime

_LOOKED_AT = 1 << 16
"""The elements of a slice that are looked at: an embedding would take memory for as many weights."""
_FAR = 0.01
"""The part of its norm by which a gradient may be off: atomic additions of a device come in any order."""
_FAR_LOSS = 1e-4
"""The part by which a loss may be off. Ranks compute it of the same values, mostly with the same bits."""
_NUM_SHOWN = 3


class _Seen(NamedTuple):
    """Two numbers that tell a gradient from another one."""

    norm: float
    product: float
    """The product with a vector of cosines."""

    def is_like(self, other: _Seen) -> bool:
        """True if both may be of the same gradient; also if one of them is not finite."""
        far = abs(self.norm - other.norm) + abs(self.product - other.product)
        return not far > _FAR * max(self.norm, other.norm)


@torch.no_grad()
def check_replicas(runtime: Runtime, loss: Tensor | None = None) -> None:
    """Compare gradients over the tensor ranks, if all of them are finite; collective.

    Args:
        runtime: the runtime of the gradients.
        loss: the loss behind them, if it is known; it is compared too.

    Raises:
        RuntimeError: on all ranks, some of them differ.
    """
    axes = runtime.context.axes
    parameters = list(_replicas(runtime))
    own = [_see(gradient) if (gradient := gradient_of(p)) is not None else None for p in parameters]
    value = None if loss is None else loss.item()
    everyone = axes.tp.all_gather_object((value, own), "comparison of gradients")
    differs = [
        any(one is not None and first is not None and not first.is_like(one) for one in others)
        for first, *others in zip(*(seen for _, seen in everyone), strict=True)
    ]
    losses = [value for value, _ in everyone]
    has_odd_loss = _are_apart([value for value in losses if value is not None])
    is_finite = all(one is None or math.isfinite(one.norm) for one in own)
    flags = [*differs, not is_finite, has_odd_loss]
    label = "agreement on gradients of tensor ranks"
    *answer, is_odd, has_odd_loss = axes.everyone.any(flags, label)()
    if is_odd:
        return
    if has_odd_loss:
        raise RuntimeError(
            f"the ranks of a tensor group have different losses; those of {axes.tp.global_ranks} are "
            f"{losses}. Expected a loss of values that all of them have: is the last layer 'colwise' in "
            "tp_plan, in place of 'colwise_gather_output'? Does the loss use values inside of blocks, which "
            "are parts? The step was not taken"
        )
    names = [p.fqn for p, is_bad in zip(parameters, answer, strict=True) if is_bad]
    if not names:
        return
    shown, more = ", ".join(map(repr, names[:_NUM_SHOWN])), len(names) - _NUM_SHOWN
    raise RuntimeError(
        f"the tensor ranks have different gradients of {shown}{f' and {more} more' if more > 0 else ''}, "
        "which each of them holds whole, so they would train different models. Expected the same random "
        "numbers on all ranks of a tensor group, and 'replicated_with_grad_allreduce' in tp_plan for a layer "
        "that gets a part of the heads. The step was not taken"
    )


def _are_apart(losses: list[float]) -> bool:
    """True if finite losses differ by more than rounding."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return bool(finite) and max(finite) - min(finite) > _FAR_LOSS * max(map(abs, finite))


def _replicas(runtime: Runtime) -> Iterator[ShardedParameter]:
    for buffer in runtime.buffers:
        if buffer.trainable:
            yield from (p for p in buffer.sharded if p.cut is None)


def _see(gradient: Tensor) -> _Seen:
    values = gradient[:_LOOKED_AT].double()
    weights = torch.ones_like(values).cumsum_(0).cos_()
    norm, product = torch.stack((values.norm(), values.dot(weights))).tolist()
    return _Seen(norm, product)
