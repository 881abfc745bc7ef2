"""The gradient of a sharded parameter, read and set without the checks of its attributes.

torch's own attribute of a subclass of Parameter takes ten times as long to read as an attribute of Python. So
each sharded parameter has the object in `_gradient` as well, which nothing but these functions sets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from zeroshard.internals.dispatch import past_guards

_SET = Tensor.grad.__set__  # type: ignore[union-attr]

gradient_of = cast(Callable[[Tensor], Tensor | None], attrgetter("_gradient"))
"""Returns the gradient of a sharded parameter, [n]; None if it has none."""


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Give a sharded parameter a gradient, of its shape, dtype and device.

    Raises:
        RuntimeError: the gradient has others.
    """
    with past_guards():
        _SET(parameter, gradient)
    cast(Any, parameter)._gradient = gradient


def set_gradients(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Give several sharded parameters a gradient each, as `set_gradient` does.

    One on another device is not in torch's own attribute, which refuses it: its parameter is to follow.
    """
    with past_guards():
        for parameter, gradient in pairs:
            try:
                _SET(parameter, gradient)
            except RuntimeError:
                if gradient is None or gradient.device == parameter.device:
                    raise
                _SET(parameter, None)
            cast(Any, parameter)._gradient = gradient


Answer = Callable[[Any], None]
"""Answers a function of torch that reads the `p.grad` of a sharded parameter."""


def _refuses(name: str, remedy: str = "") -> Answer:
    """Refuse a function that would take the slice for the whole gradient; `remedy` is the call to use."""
    return lambda parameter: parameter.refuse_reader(name, remedy)


def _drops(parameter: Any) -> None:
    """Drop sums for a function that drops gradients: it passes over a `grad` that is None."""
    parameter.drop_sums()


def _readers() -> dict[int, Answer]:
    clip = "engine.clip_grad_norm_(max_norm) or Config(clip_grad_norm=...)"
    scale = "Precision(param_dtype='float16', loss_scale=...) with engine.backward(loss) and engine.step()"
    readers: dict[Callable[..., Any], Answer] = {
        clip_grad.clip_grad_norm_: _refuses("clip_grad_norm_", clip),
        clip_grad._clip_grads_with_norm_: _refuses("clip_grads_with_norm_", clip),
        clip_grad.clip_grad_value_: _refuses("clip_grad_value_"),
        torch.amp.GradScaler._unscale_grads_: _refuses("GradScaler", scale),
        nn.Module.zero_grad: _drops,
        torch.optim.Optimizer.zero_grad: _drops,
    }
    found = {}
    for function, reader in readers.items():
        code = inspect.unwrap(function).__code__
        # A comprehension has code of its own on Python 3.11.
        for inner in (code, *(part for part in code.co_consts if isinstance(part, CodeType))):
            found[id(inner)] = reader
    return found


READERS = _readers()
"""The answers to functions of torch that mean more by `p.grad` than this rank's slice, by the id of their
code, which lives as long as torch. The caller's frame has the code."""
