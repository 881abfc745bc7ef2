"""Tensor ranks that get different batches are an error, at the first forward and now and then.

They compute parts of one batch. With several batches their sums would mix them, and no error would tell:
after a divided layer all ranks go on with the same wrong values.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Axis
from zeroshard.internals.autograd import is_in_backward
from zeroshard.internals.nested import find_tensors
from zeroshard.sharding.runtime import Runtime

_LOOKED_AT = 1 << 16
"""The elements of an input that are looked at; those of a whole batch may take a while."""
_FAR = 0.01
"""The part of its norm by which floating-point inputs may differ: a device may have computed them."""


class _Digest(NamedTuple):
    """The facts about a tensor that its ranks compare."""

    kind: str
    """Dtype and shape."""
    digest: str
    """Of integers; empty for floating-point numbers."""
    numbers: tuple[float, float] = (0.0, 0.0)
    """Of floating-point numbers: the norm, and the product with a vector of cosines."""

    @staticmethod
    def of(tensor: Tensor) -> _Digest:
        """Look at a tensor."""
        kind = f"{tensor.dtype} {list(tensor.shape)}"
        if tensor.is_meta or tensor.layout is not torch.strided:
            return _Digest(kind, "")
        values = tensor.detach().reshape(-1)[:_LOOKED_AT].cpu()
        if not (values.is_floating_point() or values.is_complex()):
            return _Digest(kind, blake2b(values.contiguous().numpy().tobytes(), digest_size=8).hexdigest())
        values = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).double()
        weights = torch.arange(values.numel(), dtype=torch.float64).cos_()
        return _Digest(kind, "", (values.norm().item(), values.dot(weights).item()))

    def is_like(self, other: _Digest) -> bool:
        """True if both may be of the same tensor; also if there are numbers that are not finite."""
        far = sum(abs(a - b) for a, b in zip(self.numbers, other.numbers, strict=True))
        is_far = far > _FAR * max(self.numbers[0], other.numbers[0])
        return self.kind == other.kind and self.digest == other.digest and not is_far


class _InputComparison:
    """Compares the inputs of the root at forwards 1, 2, 4, 8, ... in training, and in evaluation."""

    def __init__(self, axis: Axis) -> None:
        self._axis, self._num_forwards = axis, {True: 0, False: 0}
        """Forwards in training, and in evaluation."""

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_in_backward():
            return
        self._num_forwards[module.training] = number = self._num_forwards[module.training] + 1
        if number & (number - 1):  # 1, 2, 4, 8, ...
            return
        tensors = find_tensors((args, kwargs))[0]
        if not module.training:  # a cache of keys and values has other heads on each rank
            tensors = [tensor for tensor in tensors if not tensor.is_floating_point()]
        own = [_Digest.of(tensor) for tensor in tensors]
        everyone = self._axis.all_gather_object(own, "comparison of inputs")
        for rank, theirs in enumerate(everyone):
            if not _are_like(everyone[0], theirs):
                raise RuntimeError(self._explain(rank, everyone[0], theirs))

    def _explain(self, rank: int, first: Sequence[_Digest], theirs: Sequence[_Digest]) -> str:
        ranks = self._axis.global_ranks
        found = [", ".join(seen.kind for seen in one) or "no tensors" for one in (first, theirs)]
        if found[0] == found[1]:
            found = [f"{text} of some values" for text in found[:1]] + ["others of the same shapes"]
        size = len(ranks)
        return (
            f"expected the same batch on the tensor ranks {ranks}, which compute parts of it; rank "
            f"{ranks[0]} was given {found[0]}, rank {ranks[rank]} {found[1]}. Ranks with other batches are "
            f"those of DistributedSampler(data, num_replicas=world_size // {size}, rank=rank // {size})"
        )


def compare_inputs(runtime: Runtime) -> None:
    """Have the first forward of a model compare its inputs over the tensor ranks, if there are several."""
    axis = runtime.context.axes.tp
    if axis.size > 1:
        root = runtime.root.modules[0]
        compare = _InputComparison(axis)
        runtime.changes.hook(root.register_forward_pre_hook(compare, prepend=True, with_kwargs=True))


def _are_like(one: Sequence[_Digest], other: Sequence[_Digest]) -> bool:
    return len(one) == len(other) and all(a.is_like(b) for a, b in zip(one, other, strict=True))
