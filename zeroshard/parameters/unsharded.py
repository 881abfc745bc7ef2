"""Unsharded parameters: the full ones, which modules hold during forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

set_data = Tensor.data.__set__  # type: ignore[attr-defined]
"""Gives a tensor other memory, past the property of its class."""


class UnshardedParameter(nn.Parameter):
    """The full parameter inside the forward of its unit, a view of a flat buffer.

    Attributes:
        fqn: the original name.
        sharded: the sharded parameter; None once the engine is gone.
    """

    fqn = ""
    sharded: Callable[[], Any]

    @staticmethod
    def over(view: Tensor, fqn: str, class_name: str | None = None) -> UnshardedParameter:
        """Make a parameter over the memory of `view`, with a version counter of its own.

        A refill of the buffer is then no in-place change to autograd.

        Args:
            view: the values, in the shape of the original.
            fqn: the name in the model.
            class_name: the name of its class; None: `UnshardedParameter`.
        """
        parameter = nn.Parameter(view.new_empty(0), requires_grad=view.is_floating_point())
        parameter.data = view
        parameter.__class__ = UnshardedParameter if class_name is None else _named(class_name)
        unsharded = cast(UnshardedParameter, parameter)
        unsharded.fqn = fqn
        return unsharded

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook on the sharded parameter, whose `grad` is the mean over all ranks."""
        return self.sharded().register_post_accumulate_grad_hook(hook)

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


def refuse_gradient(fqn: str) -> Callable[[Tensor], None]:
    """Return the hook of a frozen parameter; it raises if a forward has made it require a gradient."""

    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise RuntimeError(
            f"'{fqn}' was frozen at initialize and got a gradient, but has no memory for one: set "
            "requires_grad=True before initialize"
        )

    return refuse
