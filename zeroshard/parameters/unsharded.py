"""Full parameters: unsharded ones, in modules during forward and backward, or under `unsharded()`; originals.

An original parameter is empty once it is sharded; the use of one that was kept elsewhere is an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self, cast

from torch import Tensor, nn

from zeroshard.internals import pytree
from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.sharded import OUTSIDE, ShardedParameter, carry_attributes, refuse_gradients

set_data = Tensor.data.__set__  # type: ignore[attr-defined]
"""Gives a tensor other memory, past the property of its class."""


class UnshardedParameter(nn.Parameter):
    """The full parameter inside the forward of its unit, a view of a flat buffer.

    Attributes:
        fqn: the original name.
        sharded: the sharded parameter; None once the engine is gone, and of a copy of a shown one.
    """

    fqn = ""
    sharded: Callable[[], Any] = staticmethod(lambda: None)

    @classmethod
    def over(cls, view: Tensor, fqn: str, class_name: str | None = None) -> Self:
        """Make a parameter over the memory of `view`, with a version counter of its own.

        A refill of the buffer is then no in-place change to autograd.

        Args:
            view: the values, in the shape of the original.
            fqn: the name in the model.
            class_name: the name of its class, if it is to have another one.
        """
        parameter = nn.Parameter(view.new_empty(0), requires_grad=view.is_floating_point())
        parameter.data = view
        parameter.__class__ = cls if class_name is None else _named(class_name)
        vars(parameter)["fqn"] = fqn
        return cast(Self, parameter)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook on the sharded parameter, whose `grad` is the mean over all ranks."""
        own = self.sharded()
        register = Tensor.register_post_accumulate_grad_hook
        return register(self, hook) if own is None else own.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> Tensor:
        """The values without a graph, over the same memory; unlike torch's, edits of them count versions."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        """Take equal values, or a cast of them: layers of bitsandbytes cast their bias in a forward.

        The parameter keeps its dtype and its memory.

        Raises:
            RuntimeError: the values are others.
        """
        if not equal_values(self.detach().to(new), new):
            raise edit_error(self.fqn)

    def set_(self, *source: Any) -> Any:
        """Do nothing if the source is the parameter itself, as where torch's parametrizations begin."""
        return self if source and source[0] is self else super().set_(*source)


class ShownParameter(UnshardedParameter):
    """A full parameter under `unsharded()`, in the main dtype. Hooks go to the trained parameter."""

    at_first: tuple[int, int]
    """Its version and its place in memory before any edit."""

    @staticmethod
    def of(sharded: ShardedParameter, view: Tensor) -> ShownParameter:
        """Make a parameter over the memory of `view`, with a version counter of its own."""
        shown = ShownParameter.over(view, sharded.fqn)
        shown.sharded = weakref.ref(sharded)
        # First: a parameter that is frozen for a while may be trained again before a loss takes it.
        refuse_gradients(shown, OUTSIDE.format(f"'{sharded.fqn}', read under engine.unsharded()"))
        shown.requires_grad_(sharded.requires_grad)
        carry_attributes(sharded, shown)
        shown.at_first = shown._version, shown.data_ptr()
        return shown

    @property
    def is_edited(self) -> bool:
        """True if its values were written, or lie in other memory, since it was made."""
        return self.at_first != (self._version, self.data_ptr())

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook on the trained parameter; see `ShardedParameter.register_hook`."""
        own = self.sharded()
        return Tensor.register_hook(self, hook) if own is None else own.register_hook(hook)  # type: ignore[no-untyped-call]

    data = property(Tensor.detach, set_data)
    """The values without a graph, over the same memory; edits of them count versions."""

    def _refuse_gradient(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"engine.unsharded() shows no gradient of '{self.fqn}': read engine.full_gradient(name), or call "
            "engine.set_full_gradient(name, gradient), on all ranks and outside of the block. Move and cast "
            "a model before initialize"
        )

    grad = property(_refuse_gradient, _refuse_gradient)
    """Refused: gradients stay slices, and a change here would be lost."""


@functools.cache
def _named(name: str) -> type[UnshardedParameter]:
    """Return the subclass of `UnshardedParameter` with another name, for code that asks for a name."""
    return type(name, (UnshardedParameter,), {"__module__": __name__})


def equal_values(values: Tensor, others: Tensor) -> bool:
    """True if two tensors have the same shape, dtype and values; NaN is equal to itself."""
    if values.shape != others.shape or values.dtype != others.dtype:
        return False
    return bool(((values == others) | ((values != values) & (others != others))).all())


def edit_error(fqn: str) -> RuntimeError:
    """Return the error for a parameter that was edited in a forward or backward."""
    return RuntimeError(
        f"'{fqn}' was edited in a forward or backward. Modules compute there with copies of the parameters, "
        "so the edit would be lost: edit it between steps, under engine.unsharded(write_back=True), or make "
        "it a buffer of the module (register_buffer), which a forward may edit"
    )


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
        first = next(value for value in values if isinstance(value, OriginalParameter))
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} got an original parameter, '{first.fqn}', from a reference "
            "that was kept when the model was sharded. It is empty now: use the module's attribute inside "
            "the forward of its unit, or read it under engine.unsharded(). Build an optimizer that "
            "initialize is not given over engine.parameters()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OriginalParameter({self.fqn}, sharded)"


def retire(parameter: nn.Parameter, fqn: str) -> None:
    """Make a parameter an `OriginalParameter`, so that any use of a reference to it raises an error.

    Args:
        parameter: the parameter, whose data was taken over.
        fqn: the name in the model.
    """
    vars(parameter).update(fqn=fqn, was=type(parameter))
    parameter.__class__ = OriginalParameter


def revive(parameter: nn.Parameter) -> None:
    """Give a parameter the class that it had before `retire`; its data is still empty."""
    if isinstance(parameter, OriginalParameter):
        del parameter.fqn
        cast(nn.Parameter, parameter).__class__ = vars(parameter).pop("was")
