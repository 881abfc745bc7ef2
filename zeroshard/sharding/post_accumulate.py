"""The user's gradient hooks on the parameters of a sharded model.

A tensor hook (`register_hook`) belongs to the unsharded parameter. It gets the whole gradient of this rank's
micro-batch before that is reduced, as in DistributedDataParallel. A post-accumulate hook belongs to the
sharded parameter. It gets that parameter once `p.grad` holds this rank's slice of the mean over all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.gradients import Gradients


class PostAccumulateHooks:
    """Calls post-accumulate hooks once for each gradient that is complete."""

    def __init__(self) -> None:
        self._waiting: dict[int, ShardedParameter] = {}
        """The parameters whose gradients have been delivered and whose hooks have not been called."""

    def note(self, gradients: Gradients, used: Sequence[bool]) -> None:
        """Note that gradients have been delivered to the parameters in `used`; some have hooks."""
        pairs = zip(gradients.buffer.sharded, used, strict=True)
        self._waiting.update((id(parameter), parameter) for parameter, is_used in pairs if is_used)

    def call(self) -> None:
        """Call the hooks of delivered gradients: no later micro-batch adds to them."""
        waiting, self._waiting = self._waiting, {}
        for parameter in waiting.values():
            with past_guards():
                hooks = parameter._post_accumulate_grad_hooks
                has_gradient = gradient_of(parameter) is not None
            for hook in tuple(hooks.values()) if hooks and has_gradient else ():
                with torch.no_grad():
                    hook(parameter)

    def drop(self) -> None:
        """Drop the parameters that wait: their gradients were dropped."""
        self._waiting.clear()


def has_hooks(gradients: Gradients) -> bool:
    """True if a parameter of these gradients has a post-accumulate hook."""
    with past_guards():
        return any(parameter._post_accumulate_grad_hooks for parameter in gradients.buffer.sharded)


def redirect_hooks(unsharded: nn.Parameter, sharded: ShardedParameter) -> None:
    """Send post-accumulate hooks that a forward registers to the sharded parameter."""
    reference = weakref.ref(sharded)

    def register(hook: Callable[[Tensor], None]) -> Any:
        sharded = reference()
        assert sharded is not None, "the buffer holds it as long as the unsharded parameter"
        return sharded.register_post_accumulate_grad_hook(hook)

    unsharded.register_post_accumulate_grad_hook = register  # type: ignore[method-assign]
