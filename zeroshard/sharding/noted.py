"""The sum of squares of gradients that leave the device, taken there before they leave.

The host would have to read all gradients once more for their norm. A note holds only as long as gradients are
those that the backward has set or added to: nobody has changed them, replaced them or seen them since.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.buffer import FlatBuffer

_Place = tuple[int, int]
"""The address of a gradient, and the number of its changes that torch has counted."""


class Noted(NamedTuple):
    """A note on the gradients of one buffer."""

    squares: Tensor
    """0-dim, float64, on the device: over the elements that the layout gives to this rank."""
    places: list[_Place | None]
    """By parameter; None for one without a gradient."""

    @classmethod
    def of(cls, buffer: FlatBuffer, squares: Tensor) -> Noted:
        """A note on the present gradients of a buffer."""
        return cls(squares, [_place_of(parameter) for parameter in buffer.sharded])

    def holds_for(self, buffer: FlatBuffer) -> bool:
        """True if the gradients of the buffer are still those that were noted."""
        if any(parameter.state.has_shown_gradients for parameter in buffer.sharded[:1]):
            return False
        return self.places == [_place_of(parameter) for parameter in buffer.sharded]


def _place_of(parameter: ShardedParameter) -> _Place | None:
    gradient = gradient_of(parameter)
    return None if gradient is None else (gradient.data_ptr(), gradient._version)
