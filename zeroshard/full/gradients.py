"""The gradients of the parameters that `unsharded()` shows: whole, in the main dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.comm import moves
from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import Axes
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import warn_user
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.wholes import own_value, wholes_in


class _Shown(NamedTuple):
    """One parameter, and the gradient that it was shown with."""

    buffer: FlatBuffer
    at: int
    parameter: nn.Parameter
    gradient: Tensor | None
    version: int

    @property
    def sharded(self) -> ShardedParameter:
        return self.buffer.sharded[self.at]

    @property
    def has_changed(self) -> bool:
        """True if another gradient is there, or this one was edited."""
        now = self.parameter.grad
        return now is not self.gradient or (now is not None and now._version != self.version)


class ShownGradients:
    """Gathers the gradients that any rank has, and writes back those that were changed; collective.

    Args:
        buffers: the buffers that are shown.
        shown: the full parameters, by the id of the sharded one.
        axes: the ranks that show them together, and those that share a gradient.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        shown: Mapping[int, nn.Parameter],
        axes: Axes,
    ) -> None:
        self._tp = axes.tp
        trained = [buffer for buffer in buffers if buffer.trainable]
        flags = [gradient is not None for buffer in trained for gradient in _gradients(buffer)]
        used = iter(axes.everyone.any(flags, "agreement on which parameters have a gradient")())
        self._shown: list[_Shown] = []
        for buffer in trained:
            is_used = [next(used) for _ in buffer.sharded]
            flat = _gather(buffer, axes.dp_shard) if any(is_used) else None
            views = [] if flat is None else wholes_in(buffer, flat, axes.tp)
            for index, sharded in enumerate(buffer.sharded):
                parameter = shown[id(sharded)]
                # Through .data it gets a version counter of its own: edits of one do not count for all.
                gradient = views[index].data if is_used[index] else None
                parameter.grad = gradient
                version = gradient._version if gradient is not None else 0
                self._shown.append(_Shown(buffer, index, parameter, gradient, version))

    def digests(self) -> list[tuple[str, bytes]]:
        """The names of the parameters whose gradients were changed, with digests of the gradients."""
        return [(one.sharded.fqn, _digest(one.parameter.grad)) for one in self._shown if one.has_changed]

    def write_back(self) -> None:
        """Keep the changes, each rank those of its slices."""
        for one in self._shown:
            if one.has_changed:
                with past_guards():
                    one.sharded.grad = _slice(one, self._tp)

    def warn_of_changes(self) -> None:
        """Warn that changes are dropped."""
        if names := [name for name, _ in self.digests()]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warn_user(
                f"the gradient of '{names[0]}'{more} was changed inside engine.unsharded() and "
                "is dropped: use engine.unsharded(write_back=True) to keep it"
            )


def _gradients(buffer: FlatBuffer) -> list[Tensor | None]:
    with past_guards():
        return [sharded.grad for sharded in buffer.sharded]


def _gather(buffer: FlatBuffer, axis: Axis) -> Tensor:
    """[total], main dtype: the gradients of all ranks; zeros for a parameter without one."""
    whole = torch.zeros(buffer.layout.total, dtype=buffer.plan.main_dtype, device=axis.device)
    own = whole[buffer.main_span.slice]
    for index, gradient in enumerate(_gradients(buffer)):
        if gradient is not None:
            own[buffer.sharded_span(index).slice].copy_(gradient.detach().view(-1))
    if buffer.is_partial:
        label = f"all-gather of the shown gradients of {buffer.describe()}"
        axis.all_gather(whole, own, tag=buffer.tag, label=label).wait()
    return whole


def _slice(one: _Shown, tp: Axis) -> Tensor | None:
    if one.parameter.grad is None:
        return None
    gradient = own_value(one.parameter.grad, one.buffer.originals[one.at], tp)
    start = one.buffer.start(one.at)
    size = one.buffer.sharded_span(one.at).size
    part = gradient.detach().reshape(-1)[start : start + size]
    part = part.to(one.buffer.plan.main_dtype, copy=True)
    return moves.beside(part, one.buffer.main)


def _digest(gradient: Tensor | None) -> bytes:
    if gradient is None:
        return b""
    return blake2b(gradient.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).digest()
