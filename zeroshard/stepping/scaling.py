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

from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import ModuleState
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.clipping import scale_


class Scaling:
    """Scales the gradients of a step part by part.

    As soon as somebody else looks at a gradient, all are scaled: a wrapper of `step()`, a step that does not
    go by parts, or anybody after a step that has failed.

    Args:
        optimizer: the optimizer of the step.
        state: the state of the module; it tells that somebody looks.
    """

    def __init__(self, optimizer: Optimizer, state: ModuleState) -> None:
        self._optimizer, self._state = weakref.ref(optimizer), state
        self._factor: Tensor | None = None
        """0-dim, float32; None if there is nothing to scale."""
        self._is_read = False
        self._left: dict[ShardedParameter, int] = {}
        """Elements at the end of each gradient that were not scaled yet: pieces come from the first on."""

    def begin(self, parameters: Iterable[ShardedParameter], factor: Tensor) -> bool:
        """Have the gradients of parameters scaled during the step that comes next.

        Returns:
            False if they must be scaled now, because hooks of others run before the step.
        """
        optimizer = self._optimizer()
        if optimizer is None or has_hooks_of_others(optimizer):
            return False
        self._factor, self._is_read = factor, False
        self._left = {p: g.numel() for p in parameters if (g := gradient_of(p)) is not None}
        self._state.before_show = self.finish
        return True

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Do nothing: there is nothing to fetch ahead."""

    @contextmanager
    def fetched(self, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
        """Scale the gradients of a part, or of a piece of it."""
        gradients = {p: g for p in parameters if (g := gradient_of(p)) is not None}
        self._scale(list(gradients.values()))
        for p, gradient in gradients.items():
            if p in self._left:
                self._left[p] -= gradient.numel()
        before, self._state.before_show = self._state.before_show, None  # now the optimizer looks
        try:
            yield
        finally:
            self._state.before_show = before

    def end_step(self) -> None:
        """Scale the gradients of parameters that the optimizer does not have, as others may read them."""
        self.finish()

    def finish(self) -> None:
        """Scale what is left at once."""
        left, self._left, self._state.before_show = self._left, {}, None
        rest = [g[-num:] for p, num in left.items() if num and (g := gradient_of(p)) is not None]
        self._scale(rest)
        self._factor = None

    @torch.no_grad()
    def _scale(self, gradients: Sequence[Tensor]) -> None:
        if self._factor is not None and not self._is_read:
            self._is_read = True
            if self._factor.item() == 1.0:
                self._factor = None
        if self._factor is not None and gradients:
            scale_(gradients, self._factor)


def has_far_parameters(runtime: Runtime) -> bool:
    """True if main parameters lie on the host or in files."""
    return any(b.trainable and b.plan.main_tier is not Tier.DEVICE for b in runtime.buffers)


def has_hooks_of_others(optimizer: Optimizer) -> bool:
    """True if hooks that are not zeroshard's run before the steps of an optimizer."""
    of_all = getattr(torch_optimizer, "_global_optimizer_pre_hooks", {})
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *of_all.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("zeroshard.") for hook in hooks)
