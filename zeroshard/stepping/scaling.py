"""The factor of clipping, applied to the gradients of each part just before its step.

One pass over all gradients would read and write host memory once more before the optimizer reads it. Here the
optimizer finds the scaled gradients of a part in the cache. The bits are those of one pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.clipping import scale_


class Scaling:
    """Scales the gradients of a step part by part, if nobody looks at them before the step.

    Args:
        optimizer: the optimizer of the step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._factor: Tensor | None = None
        """0-dim, float32; None if there is nothing to scale."""
        self._is_read = False
        self._left: dict[ShardedParameter, None] = {}
        """The parameters whose gradients were not scaled yet."""

    def begin(self, parameters: Iterable[ShardedParameter], factor: Tensor) -> bool:
        """Have the gradients of parameters scaled during the step that comes next.

        Returns:
            False if they must be scaled now, because hooks of others run before the step.
        """
        optimizer = self._optimizer()
        if optimizer is None or has_hooks_of_others(optimizer):
            return False
        self._factor, self._is_read = factor, False
        self._left = {p: None for p in parameters if gradient_of(p) is not None}
        return True

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Do nothing: there is nothing to fetch ahead."""

    @contextmanager
    def fetched(self, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
        """Scale the gradients of a part, or of a piece of it."""
        self._scale(parameters)
        yield

    def end_step(self) -> None:
        """Scale the gradients of parameters that the optimizer does not have, as others may read them."""
        self._scale(list(self._left))
        self._factor = None

    @torch.no_grad()
    def _scale(self, parameters: Sequence[ShardedParameter]) -> None:
        if self._factor is not None and not self._is_read:
            self._is_read = True
            if self._factor.item() == 1.0:
                self._factor = None
        if self._factor is not None and parameters:
            scale_([g for p in parameters if (g := gradient_of(p)) is not None], self._factor)
        for p in parameters:
            self._left.pop(p, None)


def has_far_parameters(runtime: Runtime) -> bool:
    """True if main parameters lie on the host or in files."""
    return any(b.trainable and b.plan.main_tier is not Tier.DEVICE for b in runtime.buffers)


def has_hooks_of_others(optimizer: Optimizer) -> bool:
    """True if hooks that are not zeroshard's run before the steps of an optimizer."""
    of_all = getattr(torch_optimizer, "_global_optimizer_pre_hooks", {})
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *of_all.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("zeroshard.") for hook in hooks)
