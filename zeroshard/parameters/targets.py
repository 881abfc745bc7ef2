"""Calls that ask autograd for gradients of parameters: `loss.backward(inputs=...)`, `torch.autograd.grad`.

Autograd's graph holds unsharded parameters; a sharded one is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from zeroshard.internals.dispatch import past_guards


class _Sharded(Protocol):
    unsharded: Callable[[], nn.Parameter | None]


def backward_to(tensors: Any, grad_tensors: Any = None, *, inputs: Any = None, **options: Any) -> None:
    """Run `torch.autograd.backward`; a sharded parameter among `inputs` means its unsharded one."""
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    elif isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if inputs is not None:
        inputs = tuple(map(_in_graph, cast("Iterable[object]", inputs)))
    with past_guards():
        torch.autograd.backward(tensors, grad_tensors, inputs=inputs, **options)


def _in_graph(target: object) -> object:
    unsharded = cast("_Sharded", target).unsharded() if hasattr(target, "unsharded") else None
    return target if unsharded is None else unsharded


def no_grad_of(described: str) -> RuntimeError:
    """Make the error for `torch.autograd.grad` over sharded parameters: nobody would reduce its gradients."""
    return RuntimeError(
        f"torch.autograd.grad got {described}: it would return this rank's gradient of the whole parameter, "
        "which is not averaged over the ranks. Call loss.backward(inputs=[...]) and read p.grad, this rank's "
        "slice of the mean; or keep the parameter that the forward of its module sees, and take the local "
        "gradient of that"
    )
