"""The durations of actions, as the simulator and the builder of Varuna's schedule take them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite

from zeroshard.parallel.pipeline.actions import Action, Kind

PerChunk = float | tuple[float, ...]
"""One number for all chunks, or a number for each."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The durations of actions, in any unit of time.

    The defaults are the usual ones of papers: a forward takes 1, a whole backward 2. Unshard, reshard and
    reduce take no time here, as they run beside the compute.

    Raises:
        ValueError: a duration is negative, infinite or not a number.
    """

    forward: PerChunk = 1.0
    """Duration of a forward."""
    backward_input: PerChunk = 1.0
    """Duration of the gradient of the input, the first half of a backward."""
    backward_weight: PerChunk = 1.0
    """Duration of the gradient of the weights, the second half."""
    recompute: PerChunk = 1.0
    """Duration of a recompute."""
    transfer: PerChunk = 0.0
    """Time between a send and the arrival, for a chunk's output and, the same way back, for its gradient."""
    step: float = 0.0
    """Duration of a step of a rank."""

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            for number in given if isinstance(given, tuple) else (given,):
                if not (isfinite(number) and number >= 0):
                    raise ValueError(f"{field.name}: expected a duration of at least 0, got {number}")

    def of(self, action: Action) -> float:
        """Return the duration of an action."""
        parts = _PARTS.get(action.kind, ())
        return sum((self._at(name, action.chunk) for name in parts), start=0.0)

    def transfer_after(self, chunk: int) -> float:
        """Return the duration of a transfer between a chunk and the next one, in either direction."""
        return self._at("transfer", chunk)

    def divided_by(self, number: float) -> Costs:
        """Return the costs of chunks that are a part of a rank's layers each; a transfer stays as it is."""
        return replace(
            self,
            forward=_divided(self.forward, number),
            backward_input=_divided(self.backward_input, number),
            backward_weight=_divided(self.backward_weight, number),
            recompute=_divided(self.recompute, number),
        )

    def require_chunks(self, num_chunks: int) -> None:
        """Raise ValueError if there is a list of numbers for another number of chunks."""
        for field in fields(self):
            given = getattr(self, field.name)
            needed = num_chunks - (field.name == "transfer")  # nothing leaves the last chunk
            if isinstance(given, tuple) and not needed <= len(given) <= num_chunks:
                raise ValueError(f"{field.name}: expected {num_chunks} numbers, got {len(given)}")

    def _at(self, name: str, chunk: int | None) -> float:
        given: PerChunk = getattr(self, name)
        if isinstance(given, tuple):
            assert chunk is not None  # only a step has none
            return given[chunk]
        return given


_PARTS: dict[Kind, tuple[str, ...]] = {
    Kind.FORWARD: ("forward",),
    Kind.BACKWARD: ("backward_input", "backward_weight"),
    Kind.INPUT_GRADIENT: ("backward_input",),
    Kind.WEIGHT_GRADIENT: ("backward_weight",),
    Kind.RECOMPUTE: ("recompute",),
    Kind.STEP: ("step",),
}


def _divided(given: PerChunk, number: float) -> PerChunk:
    return tuple(each / number for each in given) if isinstance(given, tuple) else given / number
