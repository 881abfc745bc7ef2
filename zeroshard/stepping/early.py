"""Steps during the backward: a unit is stepped as soon as its gradient is reduced, and the gradient goes.

So the gradients of a few units exist at a time, and the step of a tier runs beside the backward. Results are
those of a step after the backward, if there is one backward for each micro-batch. The last micro-batch's is
the one that steps; a unit is left to `optimizer.step()` if this rank has no gradient for a part of it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
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
        self._state = runtime.context.state
        (self._parts,) = parts
        self._has_failed = self._has_warned = False
        self._options: list[dict[str, Any]] = []
        """The options of each group with which units were stepped."""

    def __enter__(self) -> None:
        self._check_backward()
        self._reducer.check_step()
        optimizer = self._optimizer()
        assert optimizer is not None, "the engine holds it"
        self._warn_of_hooks(optimizer)
        self._options = _options(optimizer)
        self._reducer.step_unit = self._step

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._reducer.step_unit = None
        optimizer = self._optimizer()
        if self._state.is_in_step and optimizer is not None:  # on all ranks, as any may have stepped units
            self._halfway.begin((optimizer,), {})
            self._has_failed = exc_type is not None

    def check(self) -> None:
        """Check that the units that were stepped belong to the step that begins.

        Raises:
            RuntimeError: their backward has failed, or options of the optimizer were changed after it.
        """
        self._check_backward()
        optimizer = self._optimizer()
        if not self._state.is_in_step or optimizer is None:
            return
        for number, (before, now) in enumerate(zip(self._options, _options(optimizer), strict=False)):
            for name, value in before.items():
                if now.get(name) != value:
                    raise RuntimeError(
                        f"{name!r} of group {number} of the optimizer was changed between backward and "
                        "step(), and units have been stepped with the value before: change it before "
                        "backward, or set offload.step_in_backward=False"
                    )

    def _check_backward(self) -> None:
        if self._has_failed:
            raise RuntimeError(
                "a backward has ended in an exception after it began to step units: some may have been "
                "stepped and others have not. Load the last checkpoint with engine.load_checkpoint()"
            )

    def end(self) -> bool:
        """Note the end of the step, or a load; return True, on all ranks alike, if a backward began it."""
        is_in_step = self._state.is_in_step
        self._has_failed = self._state.is_in_step = False
        return is_in_step

    def _warn_of_hooks(self, optimizer: Optimizer) -> None:
        """Warn once of hooks of others, which may be there to change gradients."""
        if self._has_warned:
            return
        for hook in optimizer._optimizer_step_pre_hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("zeroshard."):
                self._has_warned = True
                warnings.warn(
                    "offload.step_in_backward: a hook of register_step_pre_hook() runs after units were "
                    "stepped, so it finds no gradients of them, and what it does to gradients has no effect",
                    stacklevel=4,
                )
                return

    def _step(self, unit: Unit) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None, "the engine holds it"
        self._halfway.begin((optimizer,), {})
        for gradients in unit.gradients:
            gradients.buffer.await_copies()
        parameters = {p for gradients in unit.gradients for p in gradients.buffer.sharded}
        with torch.no_grad(), past_guards():
            self._parts.step_unit(optimizer, parameters)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group; of a tensor its identity and version, as its values may be on a device."""
    return [
        {
            name: (id(value), value._version) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
