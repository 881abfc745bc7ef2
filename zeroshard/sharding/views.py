"""The one seam between a flat buffer and the parameters that a module computes with.

Modules compute with plain views of a buffer. If they are to compute with other objects (local parts of a
DTensor, packed integers), only these functions change.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from zeroshard.lazy.deferred import values_of
from zeroshard.parameters.unsharded import DataNote, UnshardedParameter, set_data, unsharded_class


def flat_of(original: Tensor) -> Tensor:
    """[numel]: the values of an original parameter in the order in which a flat buffer holds them."""
    return values_of(original).reshape(-1)


def shaped(flat: Tensor, shape: torch.Size) -> Tensor:
    """A view of a part of a flat buffer, [numel], in the shape of the original parameter."""
    return flat.view(shape)


def equal_values(values: Tensor, others: Tensor) -> bool:
    """True if two tensors of one shape and dtype have the same values; NaN is equal to itself."""
    return bool(((values == others) | ((values != values) & (others != others))).all())


def unsharded_over(view: Tensor, fqn: str, note: DataNote, class_name: str | None = None) -> nn.Parameter:
    """The unsharded parameter over a `shaped` view, with a version counter of its own.

    A refill of the buffer is then no in-place change to autograd.

    Args:
        view: the values.
        fqn: the name in the model.
        note: the note of its buffer.
        class_name: the name of its class; None: that of `UnshardedParameter`.
    """
    parameter = nn.Parameter(view.new_empty(0), requires_grad=view.is_floating_point())
    parameter.data = view
    parameter.__class__ = UnshardedParameter if class_name is None else unsharded_class(class_name)
    unsharded = cast(UnshardedParameter, parameter)
    unsharded.fqn, unsharded.note = fqn, note
    return unsharded


def move_onto(parameter: nn.Parameter, view: Tensor) -> None:
    """Put an unsharded parameter over other memory of the same shape."""
    set_data(parameter, view)
