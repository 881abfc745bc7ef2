"""The gradient and the memory of a sharded parameter, read and set without the checks of its attributes.

torch's own attribute of a subclass of Parameter takes ten times as long to read as an attribute of Python. So
each sharded parameter has the object in `_gradient` as well, which nothing but these functions sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, cast

from torch import Tensor

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.functions import SET_GRAD

_SET = SET_GRAD[0]

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
