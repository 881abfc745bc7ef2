"""Operations with two sharded parameters: right only if a rank holds the same part of both.

At stages 1 and 2 a frozen parameter is whole on every rank and a trained one is a slice. So an average of the
two, as in a teacher model, would mix whole parameters with slices. If only the shapes tell, at least one rank
meets two shapes that do not fit: the slices of all ranks together are the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.parts import num_elements

REMEDY = "use both parameters inside `with engine.unsharded(write_back=True):`, where they are whole"


def check_parts(func: Callable[..., Any], args: Sequence[Any], kind: type) -> None:
    """Refuse an element-wise operation, also a for-each one, over different parts of parameters.

    Args:
        kind: the class of sharded parameters.

    Raises:
        RuntimeError: naming both.
    """
    if isinstance(args[0], list | tuple):
        lists = [value for value in args if isinstance(value, list | tuple)]
        if len(lists) > 1 and lists[1] and type(lists[1][0]) is kind:
            for row in zip(*lists, strict=False):
                _check_row(func, row, kind)
    elif len(args) > 1:
        _check_row(func, args, kind)


def _check_row(func: Callable[..., Any], values: Sequence[Any], kind: type) -> None:
    first: Any = None
    for value in values:
        if type(value) is kind:
            if first is None:
                first = value
            elif _differ(first, value):
                name = getattr(func, "__name__", str(func))
                raise RuntimeError(
                    f"{name} got different parts of two parameters, {_tell(first)} and {_tell(value)}: "
                    f"{REMEDY}"
                )


def _differ(a: Any, b: Any) -> bool:
    if a.is_partial != b.is_partial:
        return True
    with past_guards():
        return bool(a.full_shape == b.full_shape and a.shape != b.shape)


def _tell(parameter: Any) -> str:
    with past_guards():
        held, whole = parameter.numel(), num_elements(parameter)
    part = f"{held} of" if parameter.is_partial else "all"
    return f"'{parameter.fqn}' (this rank holds {part} {whole} elements)"


def explain(error: Exception, parameter: Any) -> RuntimeError | None:
    """Return the error for shapes that do not fit, without gradients; None for other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not ("size of tensor" in text or "shape" in text):
        return None
    return RuntimeError(
        f"{text}. {parameter.describe()} has another shape than the whole parameter: a 1-D slice, or the "
        f"whole if it is frozen. To compute with other parameters, {REMEDY}"
    )
