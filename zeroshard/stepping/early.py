"""Steps during the backward: a unit is stepped as soon as its gradient is reduced, and the gradient goes.

So the gradients of a few units exist at a time, and the step of a tier runs beside the backward. Results are
those of a step after the backward, if there is one backward for each micro-batch. The last micro-batch's is
the one that steps; a unit is left to `optimizer.step()` if this rank has no gradient for a part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from zeroshard.internals.dispatch import past_guards
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.stepping.halfway import Halfway
from zeroshard.stepping.parts import Parts, is_divisible


class EarlySteps:
    """A context around the backward that steps.

    Args:
        runtime: the runtime of the parameters.
        optimizer: the optimizer of the engine.
        parts: its steps by part.
        halfway: the mark of a step that has begun.

    Raises:
        ValueError: the optimizer steps all of its parameters at once.
    """

    def __init__(
        self, runtime: Runtime, optimizer: Optimizer, parts: Sequence[Parts], halfway: Halfway
    ) -> None:
        if not is_divisible(optimizer):
            raise ValueError(
                f"offload.step_in_backward: expected an optimizer of torch, zeroshard or bitsandbytes that "
                f"steps each element by itself, got {type(optimizer).__name__}"
            )
        self._reducer, self._optimizer, self._halfway = runtime.reducer, weakref.ref(optimizer), halfway
        (self._parts,) = parts
        self._has_stepped = False

    def __enter__(self) -> None:
        if self._has_stepped:
            raise RuntimeError(
                "a second backward before step(): units were stepped in the first one. Expected one backward "
                "for each micro-batch; to take several, set offload.step_in_backward=False"
            )
        self._reducer.step_unit = self._step

    def __exit__(self, *exc_info: object) -> None:
        self._reducer.step_unit = None

    def end(self) -> bool:
        """Note that step() is called; return True if units were stepped since the last one."""
        has_stepped, self._has_stepped = self._has_stepped, False
        return has_stepped

    def _step(self, unit: Unit) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None, "the engine holds it"
        if not self._has_stepped:
            self._has_stepped = True
            self._halfway.begin((optimizer,), {})
        for gradients in unit.gradients:
            gradients.buffer.await_copies()
        parameters = {p for gradients in unit.gradients for p in gradients.buffer.sharded}
        with torch.no_grad(), past_guards():
            self._parts.step_unit(optimizer, parameters)
