"""Habits that would give other numbers than an asynchronous method names; they are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeroshard.internals.autograd import is_in_backward
from zeroshard.sharding.changes import Changes


def refuse_weights_of_forwards(
    modules: Iterable[nn.Module], changes: Changes, weights: str
) -> set[nn.Module]:
    """Refuse habits that give a backward the weights or the activations of another moment than the method.

    A second forward inside a backward would have activations of the weights of the backward. A hook of saved
    tensors may give the backward a copy of a weight, as it was in the forward: each layer is looked at once,
    in its first forward with a graph.

    Args:
        modules: the modules of this rank.
        changes: notes the hooks.
        weights: the method, which has other weights in the backward.

    Returns:
        The layers that were looked at. They are looked at again if the caller clears the set.
    """
    seen: set[nn.Module] = set()
    looking: list[nn.Module] = []
    """The layer that is looked at: an activation checkpoint runs its forward again to show what it saves."""

    def check(module: nn.Module, args: Any) -> None:
        if looking or is_in_backward():
            raise RuntimeError(
                f"an activation checkpoint runs the forward of {type(module).__name__} again inside the "
                f"backward, where pipeline.weights={weights!r} has other weights: turn checkpoints off, or "
                "set pipeline.weights to 'stash', 'vertical' or 'double'"
            )
        if module in seen or not torch.is_grad_enabled():
            return
        seen.add(module)
        looking.append(module)
        try:
            copied = _saved_as_copy(module)
        finally:
            looking.clear()
        if copied is not None:
            raise RuntimeError(
                f"hooks of saved tensors, such as save_on_cpu, give the backward a copy of {copied!r} of "
                f"{type(module).__name__} from its forward, where pipeline.weights={weights!r} has other "
                "weights: let the hooks return parameters as they are, or set pipeline.weights to 'stash', "
                "'vertical' or 'double'"
            )

    for module in modules:
        if module._parameters:
            changes.hook(module.register_forward_pre_hook(check))
    return seen


def _saved_as_copy(module: nn.Module) -> str | None:
    """Return the name of a parameter if autograd saves a copy of it now; else None."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad and parameter.numel():
            saved = torch.linalg.vector_norm(parameter).grad_fn._saved_self
            return name if saved.data_ptr() != parameter.data_ptr() else None
    return None


def refuse_autocast(device: torch.device) -> None:
    """Refuse torch.autocast, which keeps casts of weights from one micro-batch to the next.

    Raises:
        RuntimeError: it is on.
    """
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            "train_batch() of an asynchronous pipeline inside torch.autocast, which keeps casts of the "
            "weights of an earlier version: set precision.param_dtype in the config instead"
        )
