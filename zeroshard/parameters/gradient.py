"""The gradient and the memory of a sharded parameter, read and set without the checks of its attributes.

torch's own attribute of a subclass of Parameter takes ten times as long to read as an attribute of Python. So
each sharded parameter has the object in `_gradient` as well, which nothing but these functions sets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple, cast

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
    """Give several sharded parameters a gradient each, as `set_gradient` does."""
    with past_guards():
        for parameter, gradient in pairs:
            _SET(parameter, gradient)
            cast(Any, parameter)._gradient = gradient


def move_values(parameter: Tensor, values: Tensor) -> None:
    """Put a sharded parameter over other memory of its shape and dtype; its gradient stays."""
    gradient = gradient_of(parameter)
    with past_guards():
        parameter.data = values
    set_gradient(parameter, gradient)


class GradientReader(NamedTuple):
    """A function of torch that reads `p.grad` and means more by it than this rank's slice."""

    name: str
    remedy: str = ""
    """The call to use instead, if the function would take the slice for the whole gradient."""
    drops: bool = False
    """True if it drops gradients; it passes over a `grad` that is None, whose sums may wait elsewhere."""


def _readers() -> dict[int, GradientReader]:
    clip = "engine.clip_grad_norm_(max_norm) or Config(clip_grad_norm=...)"
    scale = "Precision(param_dtype='float16', loss_scale=...) with engine.backward(loss) and engine.step()"
    readers: dict[Callable[..., Any], GradientReader] = {
        clip_grad.clip_grad_norm_: GradientReader("clip_grad_norm_", clip),
        clip_grad._clip_grads_with_norm_: GradientReader("clip_grads_with_norm_", clip),
        clip_grad.clip_grad_value_: GradientReader("clip_grad_value_"),
        torch.amp.GradScaler._unscale_grads_: GradientReader("GradScaler", scale),
        nn.Module.zero_grad: GradientReader("zero_grad", drops=True),
        torch.optim.Optimizer.zero_grad: GradientReader("zero_grad", drops=True),
    }
    found = {}
    for function, reader in readers.items():
        code = inspect.unwrap(function).__code__
        # A comprehension has code of its own on Python 3.11.
        for inner in (code, *(part for part in code.co_consts if isinstance(part, CodeType))):
            found[id(inner)] = reader
    return found


READERS = _readers()
"""The reader by the id of its code, which lives as long as torch. The caller's frame has the code."""
