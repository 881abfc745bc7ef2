"""Tensor ranks hold some parameters whole each: do they train them alike?

Tensor ranks compute the same values between divided layers, so they step these parameters alike and exchange
nothing for them. If they were given other batches, drew another dropout, or use such a parameter for a part
of the heads only, the parameters would drift apart, and no error would follow. A loss of values that are
parts, as of a last layer that stays divided, is another loss on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.internals.warn import first_of
from zeroshard.parameters.sharded import gradient_of
from zeroshard.sharding.runtime import Runtime

_LOOKED_AT = 1 << 16
"""The elements of a slice that are looked at: an embedding would take memory for as many weights."""
_FAR = 0.01
"""The part of its norm by which a gradient may be off: atomic additions of a device come in any order."""
_FAR_LOSS = 2e-4
"""Twice the part by which a loss may be off. Ranks compute it of the same values, mostly to the bit."""

_Seen = tuple[float, float] | None
"""The magnitude of a value, and a number in which it differs from others; None for no value."""


@torch.no_grad()
def check_replicas(runtime: Runtime, loss: Tensor | None = None) -> None:
    """Compare gradients over the tensor ranks, if all of them are finite; collective.

    Args:
        runtime: the runtime of the gradients.
        loss: the loss that they come from, if it is known; it is compared, too.

    Raises:
        RuntimeError: on all ranks, some of them differ.
    """
    axes = runtime.context.axes
    trained = (buffer for buffer in runtime.buffers if buffer.trainable)
    parameters = [p for buffer in trained for p in buffer.sharded if p.cut is None]
    gradients = [gradient_of(p) for p in parameters]
    value = None if loss is None else loss.item()
    own = [None if value is None else (abs(value), value), *map(_see, gradients)]
    everyone = axes.tp.all_gather_object(own, "comparison of gradients")
    losses, *others = zip(*everyone, strict=True)
    is_odd = not math.isfinite(sum(one[0] for one in own if one is not None))
    flags = [is_odd, _differ(losses, _FAR_LOSS), *(_differ(seen, _FAR) for seen in others)]
    label = "agreement on gradients of tensor ranks"
    is_odd, has_odd_loss, *answer = axes.everyone.any(flags, label)()
    names = [p.fqn for p, is_bad in zip(parameters, answer, strict=True) if is_bad]
    if is_odd or not (has_odd_loss or names):
        return
    if has_odd_loss:
        raise RuntimeError(
            f"the tensor ranks {axes.tp.global_ranks} have different losses. Expected a loss of values that "
            "all of them have: is the last layer 'colwise' in tp_plan, in place of 'colwise_gather_output'? "
            "Does the loss use values inside of blocks, which are parts? The step was not taken"
        )
    raise RuntimeError(
        f"the tensor ranks have different gradients of {first_of(names)}, "
        "which each of them holds whole, so they would train different models. Expected the same random "
        "numbers on all ranks of a tensor group, and 'replicated_with_grad_allreduce' in tp_plan for a layer "
        "that gets a part of the heads. The step was not taken"
    )


def _see(gradient: Tensor | None) -> _Seen:
    """The norm of a gradient, and its product with a vector of cosines."""
    if gradient is None:
        return None
    values = gradient[:_LOOKED_AT].double()
    weights = torch.ones_like(values).cumsum_(0).cos_()
    norm, product = torch.stack((values.norm(), values.dot(weights))).tolist()
    return norm, product


def _differ(everyone: Sequence[_Seen], far: float) -> bool:
    """True if ranks have seen other values than the first one; none that is not finite differs."""
    (norm, product), *others = [one for one in everyone if one is not None] or [(0.0, 0.0)]
    return any(abs(norm - n) + abs(product - q) > far * max(norm, n) for n, q in others)
