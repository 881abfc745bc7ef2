"""Steps during the backward: a unit is stepped as soon as its gradient is reduced, and the gradient goes.

So the gradients of a few units exist at a time, and values of a farther tier travel during the backward.
Results are the same as with a step after the backward, if there is one backward for each micro-batch. The
backward of the last micro-batch steps: in `train_batch`, where nobody else asks for gradients, or anywhere
with `offload.step_in_backward`. A unit is left to `optimizer.step()` if this rank has no gradient for a part
of it, or if its gradient may come in several parts. The host waits for stepped values before somebody looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import warn_user
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import Moment
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.stepping.clipping import has_hooks_of_others
from zeroshard.stepping.parts import StepByParts, steps_by_unit


class EarlySteps(AbstractContextManager[None]):
    """A context around the backward that steps. At its end all units are stepped that were begun.

    Args:
        runtime: the runtime of the parameters.
        optimizer: the optimizer of the engine.
        parts: its steps by part.

    Raises:
        ValueError: all backwards are to step, but ranks wait for each other in a step of the optimizer, or
            its class is not known.
    """

    def __init__(self, runtime: Runtime, optimizer: Optimizer, parts: Sequence[StepByParts]) -> None:
        self._steps_all = bool(runtime.context.setting.steps_in_backward)
        self._can_step = steps_by_unit(optimizer, runtime.context.axes)
        if self._steps_all and not self._can_step:
            raise ValueError(
                f"offload.step_in_backward: expected an optimizer of torch, zeroshard or bitsandbytes that "
                f"steps each element by itself, or one rank, got {type(optimizer).__name__}"
            )
        self._reducer, self._optimizer, self._state = runtime.reducer, optimizer, runtime.state
        (self._parts,) = parts
        self._step_of_engine: Any = optimizer.step
        """The step that judges, steps and counts."""
        self._uncounted: list[tuple[FlatBuffer, set[ShardedParameter]]] = []
        """Parameters that this backward has stepped, and may still read as they were."""
        self._options: dict[str, dict[str, Any]] = {}
        """The options of each group, and of single parameters, with which units were stepped."""

    def around(self) -> AbstractContextManager[None]:
        """Return a context for the last backward of a step.

        In the first one, if it is of `train_batch`, nothing is stepped: it shows whether gradients come after
        the reduction of their unit.
        """
        if self._steps_all:
            return self
        optimizer, own = self._optimizer, self._step_of_engine
        step: Any = optimizer.step  # an LR scheduler wraps the function of the method
        is_own = step is own or getattr(step, "__wrapped__", None) is own.__func__
        is_asked = any(has_hooks_of_others(optimizer, when) for when in ("pre", "post"))
        may = self._can_step and is_own and not is_asked and self._reducer.num_late == 0
        return self if may else nullcontext()

    def __enter__(self) -> None:
        self._state.refuse("a backward", Moment.FAILED)
        self._reducer.check_begin()
        self._state.steps.finish_steps()
        if has_hooks_of_others(self._optimizer):
            warn_user(
                "offload.step_in_backward: a hook of register_step_pre_hook() runs after units were "
                "stepped, so it finds no gradients of them, and what it does to gradients has no effect"
            )
        self._options = _options(self._optimizer)
        self._parts.begin_units()
        self._reducer.step_unit = self._step

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._reducer.step_unit = None
        uncounted, self._uncounted = self._uncounted, []
        for buffer, parameters in uncounted:
            buffer.count_step(parameters)
        if Moment.STEPPED in self._state.moments:  # on all ranks: any may have stepped units
            self._state.begin_step() if exc_type is None else self._state.fail_step()
            self._parts.wait_later()

    def check(self) -> None:
        """Check that the units that were stepped belong to the step that begins.

        Raises:
            RuntimeError: their backward has failed, or options of the optimizer were changed after it.
        """
        self._state.refuse("a step", Moment.FAILED)
        if Moment.STEPPED not in self._state.moments:
            return
        now = _options(self._optimizer)
        for owner, before in self._options.items():
            for name, value in before.items():
                if now[owner].get(name) != value:
                    raise RuntimeError(
                        f"{name!r} of {owner} of the optimizer was changed between backward and "
                        "step(), and units have been stepped with the value before: change it before "
                        "backward, or set offload.step_in_backward=False"
                    )

    def _step(self, unit: Unit) -> None:
        """Step a unit whose gradients are reduced."""
        self._state.begin_step()
        parameters = {p for gradients in unit.gradients for p in gradients.buffer.sharded}
        with torch.no_grad(), past_guards():
            self._parts.step_units(self._optimizer, parameters, unit.gradients)
        if self._parts.late is not None:
            self._parts.late.wait_later(self._parts.wait)  # a hook of this backward may look
        for buffer in (gradients.buffer for gradients in unit.gradients):
            if buffer.plan.is_alias:  # a later use of these values in the backward is torch's error
                buffer.count_step(parameters)
            else:
                self._uncounted.append((buffer, parameters))


def _options(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The options of each group; of a tensor its identity and version, as its values may be on a device."""
    return {
        f"group {number}": {
            name: (id(value), value._version) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for number, group in enumerate(optimizer.param_groups)
    }
