"""A batch is cut into the micro-batches of an optimizer step, and moved to the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from zeroshard.internals import pytree


def split_batch(value: Any, num_pieces: int, key: str = "gradient_accumulation_steps") -> list[Any]:
    """Cut every tensor of a batch along dim 0; each piece gets all scalars.

    Args:
        value: the batch.
        num_pieces: the number of pieces.
        key: the name of this number in error messages.

    Raises:
        ValueError: the batch does not divide, or holds an object of a type that may hide tensors.
    """
    if isinstance(value, Mapping):
        columns = {name: split_batch(item, num_pieces, key) for name, item in value.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(num_pieces)]
    if isinstance(value, list | tuple):
        items = [split_batch(item, num_pieces, key) for item in value]
        build = getattr(type(value), "_make", type(value))  # a named tuple takes its items one by one
        return [build(item[i] for item in items) for i in range(num_pieces)]
    if value is None or isinstance(value, bool | int | float | str) or num_pieces == 1:
        return [value] * num_pieces
    if not isinstance(value, Tensor):
        raise ValueError(
            "expected a batch of tensors, or tuples, lists or mappings of them, to cut into micro-batches, "
            f"got {type(value).__name__}"
        )
    if not value.dim():
        return [value] * num_pieces
    if value.shape[0] % num_pieces:
        raise ValueError(
            f"expected a batch whose dim 0 is a multiple of {key}={num_pieces}, "
            f"got shape {tuple(value.shape)}"
        )
    # chunk() gives views with one version counter, so an edit of one looks like an edit of all; `data` has
    # its own counter.
    return [piece if piece.requires_grad else piece.data for piece in value.chunk(num_pieces)]


def to_device(value: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to an accelerator through pinned memory, so that the host does not wait.

    Finds tensors in the containers that torch knows, and in mappings that take new values. Other objects with
    `to`, such as torch's PackedSequence, move themselves. An object without, such as a dataclass, stays.

    Returns:
        The batch itself for the CPU; new containers of the same types for an accelerator.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.is_cpu and torch.accelerator.is_available():
                leaf = leaf.pin_memory()  # else the host would wait for all earlier work of the stream
            return leaf.to(device, non_blocking=True)
        if isinstance(leaf, MutableMapping):
            moved = copy.copy(leaf)  # it may have more than its items
            moved.update({key: to_device(item, device) for key, item in leaf.items()})
            return moved
        if hasattr(leaf, "to"):
            return leaf.to(device)  # a PackedSequence keeps a part of it on the CPU
        return leaf

    if device.type == "cpu":
        return value
    leaves, structure = pytree.tree_flatten(value, is_leaf=lambda part: hasattr(part, "to"))
    return pytree.tree_unflatten(map(move, leaves), structure)


def micro_batches(
    batch: tuple[Any, Any], num: int, device: torch.device, key: str = "gradient_accumulation_steps"
) -> Iterator[tuple[Any, Any]]:
    """Yield the micro-batches of inputs and targets, on a device; see `split_batch` and `to_device`."""
    for inputs, targets in zip(*(split_batch(value, num, key) for value in batch), strict=True):
        yield to_device(inputs, device), to_device(targets, device)


# ------------------------------------------------------------------------------------------------ losses


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
