"""Original parameters after sharding: empty; the use of one that was kept elsewhere is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from zeroshard.internals import pytree
from zeroshard.internals.dispatch import past_guards

_DESCRIBES = frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "layout", "is_leaf", "is_meta", "requires_grad")
) | {Tensor.__hash__, Tensor.is_floating_point, Tensor.is_complex}
"""The attributes that an original parameter still answers: none of its shape or its values."""


class OriginalParameter(nn.Parameter):
    """A parameter that was sharded. The modules hold others in its place.

    Attributes:
        fqn: the name in the model.
        was: the class before sharding.
    """

    fqn: str
    was: type[nn.Parameter]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _DESCRIBES:
            with past_guards():
                return func(*args, **(kwargs or {}))
        values = pytree.tree_leaves((args, kwargs))
        raise RuntimeError(_describe(next(v for v in values if isinstance(v, OriginalParameter)), func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OriginalParameter({self.fqn}, sharded)"


def retire(parameter: nn.Parameter, fqn: str) -> None:
    """Make a parameter an `OriginalParameter`, so that any use of a reference to it raises an error.

    Args:
        parameter: the parameter, whose data was taken over.
        fqn: the name in the model.
    """
    was = type(parameter)
    parameter.__class__ = OriginalParameter
    assert isinstance(parameter, OriginalParameter)
    parameter.fqn, parameter.was = fqn, was


def class_before(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class that a parameter had before `retire`, if there was one."""
    return parameter.was if isinstance(parameter, OriginalParameter) else type(parameter)


def revive(parameter: nn.Parameter) -> None:
    """Give a parameter the class that it had before `retire`; its data is still empty."""
    if isinstance(parameter, OriginalParameter):
        was = parameter.was
        del parameter.fqn, parameter.was
        cast(nn.Parameter, parameter).__class__ = was


def _describe(parameter: OriginalParameter, func: Callable[..., Any]) -> str:
    used = getattr(func, "__name__", str(func))
    if used == "__get__":
        used = getattr(getattr(func, "__self__", None), "__name__", used)
    return (
        f"{used} got an original parameter, '{parameter.fqn}', from a reference that was kept when the model "
        "was sharded. It is empty now: use the module's attribute inside the forward of its unit, or read it "
        "under engine.unsharded(). Build an optimizer that initialize is not given over engine.parameters()"
    )
