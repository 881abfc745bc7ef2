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
