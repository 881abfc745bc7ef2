"""Habits that would give other numbers than an asynchronous method names; they are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeroshard.internals.autograd import is_in_backward
from zeroshard.sharding.changes import Changes


def refuse_recomputation(modules: Iterable[nn.Module], changes: Changes, weights: str) -> None:
    """Refuse a second forward inside a backward, of any layer that has parameters.

    Its activations would be those of the weights of the backward, not of the forward.

    Args:
        modules: the modules of this rank.
        changes: notes the hooks.
        weights: the method, which has other weights in the backward.
    """

    def check(module: nn.Module, args: Any) -> None:
        if is_in_backward():
            raise RuntimeError(
                f"an activation checkpoint runs the forward of {type(module).__name__} again inside the "
                f"backward, where pipeline.weights={weights!r} has other weights: turn checkpoints off, or "
                "set pipeline.weights to 'stash', 'vertical' or 'double'"
            )

    for module in modules:
        if module._parameters:
            changes.hook(module.register_forward_pre_hook(check))


def refuse_saved_copies(modules: Iterable[nn.Module], changes: Changes, weights: str) -> set[nn.Module]:
    """Refuse hooks of saved tensors that give the backward a copy of a weight, as it was in the forward.

    Each layer is looked at once, in its first forward with a graph.

    Args:
        modules: the modules of this rank.
        changes: notes the hooks.
        weights: the method, which has other weights in the backward.

    Returns:
        The layers that were looked at. They are looked at again if the caller clears the set.
    """
    seen: set[nn.Module] = set()

    def check(module: nn.Module, args: Any) -> None:
        if module in seen or not torch.is_grad_enabled():
            return
        seen.add(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter.numel():
                saved = torch.linalg.vector_norm(parameter).grad_fn._saved_self
                if saved.data_ptr() != parameter.data_ptr():
                    raise RuntimeError(
                        f"hooks of saved tensors, such as save_on_cpu, give the backward a copy of {name!r} "
                        f"of {type(module).__name__} from its forward, where pipeline.weights={weights!r} "
                        "has other weights: let the hooks return parameters as they are, or set "
                        "pipeline.weights to 'stash', 'vertical' or 'double'"
                    )
                return

    for module in modules:
        if module._parameters:
            changes.hook(module.register_forward_pre_hook(check))
    return seen


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
