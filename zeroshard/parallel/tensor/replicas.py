"""Tensor ranks compare values that must be the same on all of them: their batches, and some gradients.

They compute parts of one batch. With several batches their sums would mix them, and no error would tell:
after a divided layer all ranks go on with the same wrong values. So inputs that differ are an error, at the
first forward and now and then.

Tensor ranks compute the same values between divided layers, so they step these parameters alike and exchange
nothing for them. If they were given other batches, drew another dropout, or use such a parameter for a part
of the heads only, the parameters would drift apart, and no error would follow. A loss of values that are
parts, as of a last layer that stays divided, is another loss on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.internals.autograd import is_in_backward
from zeroshard.internals.nested import find_tensors
from zeroshard.internals.warn import first_of
from zeroshard.parameters.sharded import gradient_of
from zeroshard.sharding.runtime import Runtime

_LOOKED_AT = 1 << 16
"""The elements of a slice or an input that are looked at: all take memory for as many weights, or a while."""
_FAR = 0.01
"""The part of its norm by which a gradient may be off: atomic additions of a device come in any order. So may
floating-point inputs: a device may have computed them."""
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
    runtime.state.steps.before_look()
    trained = (buffer for buffer in runtime.buffers if buffer.trainable)
    parameters = [p for buffer in trained for p in buffer.sharded if p.cut is None]
    gradients = [gradient_of(p) for p in parameters]
    value = None if loss is None else loss.item()
    own = [None if value is None else (abs(value), value), *map(_see, gradients)]
    everyone = axes.tp.all_gather_object(own, "comparison of gradients")
    # Not `require_equal`: losses and gradients may be off by a part, see `_FAR`, which no text can be.
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


def _see(values: Tensor | None) -> _Seen:
    """The norm of some values, [n], and their product with a vector of cosines."""
    if values is None:
        return None
    values = values[:_LOOKED_AT].double()
    weights = torch.ones_like(values).cumsum_(0).cos_()
    norm, product = torch.stack((values.norm(), values.dot(weights))).tolist()
    return norm, product


def _differ(everyone: Sequence[_Seen], far: float) -> bool:
    """True if ranks have seen other values than the first one; none that is not finite differs."""
    (norm, product), *others = [one for one in everyone if one is not None] or [(0.0, 0.0)]
    return any(abs(norm - n) + abs(product - q) > far * max(norm, n) for n, q in others)


# -------------------------------------------------------------------- the same batch on all tensor ranks


class _Digest(NamedTuple):
    """The facts about a tensor that its ranks compare."""

    kind: str
    """Dtype and shape."""
    digest: str
    """Of integers; empty for floating-point numbers."""
    seen: _Seen = None
    """Of floating-point numbers."""

    @staticmethod
    def of(tensor: Tensor) -> _Digest:
        """Look at a tensor."""
        kind = f"{tensor.dtype} {list(tensor.shape)}"
        if tensor.is_meta or tensor.layout is not torch.strided:
            return _Digest(kind, "")
        values = tensor.detach().reshape(-1)[:_LOOKED_AT].cpu()
        if not values.is_floating_point():
            bits = values.contiguous().view(torch.uint8).numpy()
            return _Digest(kind, blake2b(bits.tobytes(), digest_size=8).hexdigest())
        return _Digest(kind, "", _see(values))

    def is_like(self, other: _Digest) -> bool:
        """True if both may be of the same tensor; also if there are numbers that are not finite."""
        return self[:2] == other[:2] and not _differ((self.seen, other.seen), _FAR)


def compare_inputs(runtime: Runtime) -> None:
    """Have a model compare its inputs over the tensor ranks, if there are several.

    It does so at forwards 1, 2, 4, 8, ... in training, and in evaluation.
    """
    axis, num_forwards = runtime.context.axes.tp, {True: 0, False: 0}

    @torch.no_grad()
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_in_backward():
            return
        num_forwards[module.training] = number = num_forwards[module.training] + 1
        if number & (number - 1):  # 1, 2, 4, 8, ...
            return
        tensors = find_tensors((args, kwargs))[0]
        if not module.training:  # a cache of keys and values has other heads on each rank
            tensors = [tensor for tensor in tensors if not tensor.is_floating_point()]
        own = [_Digest.of(tensor) for tensor in tensors]
        first, *others = axis.all_gather_object(own, "comparison of inputs")
        # Not `require_equal`: floating-point inputs may be off by a part, see `_FAR`, which no text can be.
        for rank, theirs in enumerate(others, start=1):
            if len(first) != len(theirs) or not all(map(_Digest.is_like, first, theirs)):
                raise RuntimeError(_explain(axis.global_ranks, rank, first, theirs))

    if axis.size > 1:
        root = runtime.module
        runtime.changes.hook(root.register_forward_pre_hook(compare, prepend=True, with_kwargs=True))


def _explain(ranks: Sequence[int], rank: int, first: Sequence[_Digest], theirs: Sequence[_Digest]) -> str:
    found = [", ".join(seen.kind for seen in one) or "no tensors" for one in (first, theirs)]
    if found[0] == found[1]:
        found = [f"{text} of some values" for text in found[:1]] + ["others of the same shapes"]
    size = len(ranks)
    return (
        f"expected the same batch on the tensor ranks {ranks}, which compute parts of it; rank "
        f"{ranks[0]} was given {found[0]}, rank {ranks[rank]} {found[1]}. Ranks with other batches are "
        f"those of DistributedSampler(data, num_replicas=world_size // {size}, rank=rank // {size})"
    )
