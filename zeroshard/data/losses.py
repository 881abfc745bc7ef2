"""A loss: checked before its backward, or taken from what a model returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

LossFunction = Callable[[Any, Any], Tensor]
"""(output of the model, targets) -> loss, 0-dim."""


def check_loss(loss: object) -> None:
    """Check the loss that is given to a backward.

    Raises:
        ValueError: it is not a tensor of one element that requires a gradient.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    if isinstance(loss, Tensor):
        got = f"a tensor of shape {list(loss.shape)} with requires_grad={loss.requires_grad}"
    else:
        got = f"{loss!r:.80}"
    raise ValueError(f"backward: expected a loss of one element that requires a gradient, got {got}")


def loss_of(
    model: Callable[..., Any], loss_function: LossFunction | None, inputs: Any, targets: Any
) -> Tensor:
    """Call a model and return its loss.

    Args:
        model: the model.
        loss_function: its arguments are the output of the model and the targets. None: the output has a
            `loss`, and targets are given to the model as `labels`.
        inputs: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        targets: the targets; None: the model has them already, or needs none.

    Raises:
        ValueError: the output has no loss.
    """
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = inputs if isinstance(inputs, tuple) else () if named else (inputs,)
    if loss_function is not None:
        return loss_function(model(*args, **named), targets)
    output = model(*args, **named) if targets is None else model(*args, **named, labels=targets)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            "train_batch() needs loss_fn= at initialize, or a model whose output has a tensor `loss`; "
            f"the model returned {type(output).__name__}"
        )
    return loss
