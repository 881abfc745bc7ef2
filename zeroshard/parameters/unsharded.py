"""Unsharded parameters: the full ones, which modules hold during forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeroshard.parameters.state import ModuleState

_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
set_data = Tensor.data.__set__  # type: ignore[attr-defined]
"""Gives a tensor other memory, past the property of its class."""


class DataNote:
    """A note that somebody was given the `.data` of a buffer's parameters; edits of it count no version.

    Args:
        state: the state of the module.
    """

    __slots__ = ("before", "is_taken", "state")

    def __init__(self, state: ModuleState) -> None:
        self.is_taken, self.state = False, state
        self.before: dict[str, Tensor] | None = None
        """By name, the values that somebody was given; None where nobody asks if they were edited."""

    def take(self, parameter: UnshardedParameter) -> Tensor:
        """Return the values of a parameter, and note that somebody has them."""
        values: Tensor = _GET_DATA(parameter)
        self.is_taken = True
        if self.before is not None and parameter.fqn not in self.before:
            self.before[parameter.fqn] = values.clone()
        return values


class UnshardedParameter(nn.Parameter):
    """The full parameter inside the forward of its unit, a view of a flat buffer.

    Attributes:
        fqn: the original name.
        note: the note of its buffer.
    """

    fqn = ""
    note: DataNote

    @property
    def data(self) -> Tensor:
        """The values, in the shape of the original. A read is noted: an edit through it counts no version."""
        return self.note.take(self)

    @data.setter
    def data(self, new: Tensor) -> None:
        """Take over the values; the memory stays that of the buffer.

        Raises:
            RuntimeError: the values have another shape, or lie in the memory of another parameter.
        """
        if new.shape != self.shape:
            raise RuntimeError(
                f"the data of '{self.fqn}' is a view of a flat buffer: expected new data of the shape "
                f"{list(self.shape)}, got {list(new.shape)}. Change shapes before initialize"
            )
        if self.note.state.owns_memory(new):
            if not 0 <= new.data_ptr() - self.data_ptr() < self.nbytes:
                raise RuntimeError(
                    f"'{self.fqn}' was given the data of another parameter and would share its memory; a "
                    "sharded parameter has memory of its own. Assign a copy, other.data.clone(); to swap "
                    "two parameters, clone both first; to tie two, assign one Parameter to both before "
                    "initialize"
                )
            new = new.clone()  # a view of itself, such as its transpose
        with torch.no_grad():
            self.note.take(self).copy_(new)


@functools.cache
def unsharded_class(name: str) -> type[UnshardedParameter]:
    """Return the subclass of `UnshardedParameter` with another name, for code that asks for a name."""
    return type(name, (UnshardedParameter,), {"__module__": __name__})


def refuse_gradient(fqn: str) -> Callable[[Tensor], None]:
    """Return the hook of a frozen parameter; it raises if a forward has made it require a gradient."""

    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise RuntimeError(
            f"'{fqn}' was frozen at initialize and got a gradient, but has no memory for one: set "
            "requires_grad=True before initialize"
        )

    return refuse
