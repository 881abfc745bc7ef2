"""Steps of an optimizer that wait for the next forward: each unit is stepped just before its use there.

    step()      takes gradients and options, and gives each unit its step
    compute     | step 0 | forward 0 | step 1 | forward 1 | step 2 | forward 2 |
    copies      | states 1 up        | states 2 up, 0 down | states 3 up, 1 down

So values on the host travel along with a forward. Values are those of a step at once. What no forward has
reached is stepped before the next backward or step begins. Before anybody looks at parameters, gradients or
states from outside, all steps are taken, and the host waits until their values are at rest; else it does not.

A tensor over the memory of a parameter, as `p.data`, could be read unseen. Once somebody has one, steps no
longer wait; nor after a read of `optimizer.state`. Nor does a step whose gradients somebody holds.
"""

from __future__ import annotations

import sys
import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _pop_mode_temporarily

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.sharded import ShardedParameter, gradient_of, set_gradients
from zeroshard.parameters.state import ModuleState, Moment, Steps
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.stepping.clipping import scale_

Step = Callable[[], None]
Pairs = list[tuple[ShardedParameter, Tensor | None]]
"""Parameters with their gradients."""


class LateSteps(Steps):
    """The steps of one optimizer that wait for a forward.

    Args:
        runtime: the runtime of the parameters.
        optimizer: the optimizer, which steps each parameter by itself.
    """

    def __init__(self, runtime: Runtime, optimizer: Optimizer) -> None:
        self._state, self._device = runtime.state, runtime.context.device
        self._runtime = weakref.ref(runtime)  # the optimizer holds this
        self._left: dict[Unit, list[tuple[Step, Pairs, Tensor | None]]] = {}
        """The steps of each unit, with gradients, and the factor of those on the host."""
        self._unscaled: Pairs = []
        """Gradients on the host that are still to be multiplied by `_factor`, if a parameter has them yet."""
        self._factor: Tensor | None = None
        self._end: Step | None = None
        """Ends the step whose parts wait, or have waited since the last look."""
        self._waits: dict[Step, None] = {}
        """Let the host wait for values of the last step, and for gradients; none: all are at rest."""
        self._num_modes = 0
        """The modes of torch's dispatch around the last step."""
        self._state.gives_memory, self._state.steps = self._step_at_once, self
        self.watch(optimizer)
        optimizer.register_state_dict_pre_hook(lambda _: self._step_at_once())  # its tensors may be kept
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish())
        optimizer.register_load_state_dict_post_hook(self.watch)

    def watch(self, optimizer: Optimizer) -> None:
        """Notice who reads the states; a load puts others into the place of them."""
        states: Any = optimizer.state
        if not isinstance(states, _LateStates):
            optimizer.state = _LateStates(states, self._state)  # type: ignore[assignment]

    def take(self, parts: Sequence[tuple[list[ShardedParameter], Step]], end: Step, wait: Step) -> bool:
        """Let the parts of a step wait, each for a forward of its unit.

        Args:
            parts: the parameters of each part, all with gradients, and its step; a part without parameters
                is stepped at once.
            end: ends the step, after all parts.
            wait: lets the host wait for the values of the step, before somebody looks.

        Returns:
            False, and nothing is done, if somebody may look unseen, or backwards are under way, as in the
            list of an asynchronous pipeline.
        """
        runtime, state = self._runtime(), self._state
        if runtime is None or not self._may_wait():
            return False
        units = {unit.name: unit for unit in runtime.units}
        for parameters, step in parts:
            if parameters:
                gradients = [(p, gradient_of(p)) for p in parameters]
                self._left.setdefault(units[parameters[0].unit_name], []).append(
                    (step, gradients, self._factor)
                )
            else:
                step()
        for unit in self._left:
            unit.wait_for_step(lambda unit=unit: self._step(unit))  # type: ignore[misc]
        self._end, self._waits[wait], state.look = end, None, self.finish
        self._num_modes = torch._C._len_torch_dispatch_stack()
        if not self._left:
            self.finish_steps()
        return True

    def positions(self) -> dict[str, int]:
        """The place of each unit in the order of forwards."""
        runtime = self._runtime()
        return {} if runtime is None else {unit.name: unit.position for unit in runtime.units}

    def wait_later(self, wait: Step) -> bool:
        if Moment.BATCH in self._state.moments:
            return False
        self._waits[wait], self._state.look = None, self.finish
        return self._may_wait()

    def _may_wait(self) -> bool:
        """True if nobody looks unseen, and no backwards are under way."""
        state = self._state
        is_unseen = state.gives_memory is not None and not state.has_shown_gradients
        return is_unseen and Moment.BATCH not in state.moments

    def scale_later(self, gradients: Pairs, factor: Tensor) -> bool:
        if not self._may_wait():
            return False
        self._unscaled, self._factor, self._state.look = gradients, factor, self.finish
        return True

    def settle(self) -> None:
        self.finish_steps()  # with gradients that are not scaled
        if (factor := self._factor) is not None:
            present = [g for p, g in self._unscaled if g is not None and gradient_of(p) is g]
            self._unscaled, self._factor = [], None
            if present:
                self._wait()
                scale_(present, factor)

    def finish(self) -> None:
        """Take the steps that are left, end the step, and wait for its values."""
        self.settle()
        self._wait()

    def _wait(self) -> None:
        waits, self._waits, self._state.look = self._waits, {}, object
        for wait in waits:
            wait()

    def finish_steps(self) -> None:
        while self._left:
            self._step(next(iter(self._left)))
        end, self._end = self._end, None
        self._state.look = self.finish if self._waits or self._unscaled else object
        try:
            if end is not None:
                end()
        except BaseException:
            self._state.fail_step()
            raise

    def _step(self, unit: Unit) -> None:
        """Take the step of a unit, in the modes of nobody's forward."""
        no_cast = torch.autocast(self._device.type, enabled=False)
        unit.step_under_way = object
        try:
            with ExitStack() as modes, torch.inference_mode(False), torch.no_grad(), past_guards(), no_cast:
                modes.enter_context(self.unseen())
                for _ in range(torch._C._len_torch_dispatch_stack() - self._num_modes):
                    modes.enter_context(_pop_mode_temporarily())  # a selective checkpoint counts calls
                for step, gradients, factor in self._left.pop(unit):
                    present = [(p, gradient_of(p)) for p, _ in gradients]
                    try:
                        self._state.factor = factor
                        set_gradients(gradients)
                        step()
                    finally:
                        set_gradients(present)
                        self._state.factor = None
        except BaseException:
            self._state.fail_step()
            raise

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Let an optimizer read what it steps: nobody looks."""
        state = self._state
        before, shown, state.look = state.look, state.has_shown_gradients, object
        try:
            yield
        finally:
            state.look, state.has_shown_gradients = before, shown

    def follow(self, unit_name: str, call: Step) -> None:
        steps = next((steps for unit, steps in self._left.items() if unit.name == unit_name), None)
        if steps is None:
            call()
        else:
            steps.append((call, [], None))

    def _step_at_once(self) -> None:
        self._state.gives_memory = None
        self.finish()


def own_states(optimizer: Optimizer) -> Any:
    """The states of an optimizer, for its own step: nobody looks."""
    states: Any = optimizer.state
    return states._states if isinstance(states, _LateStates) else states


class _LateStates(UserDict[Any, dict[str, Any]]):
    """The states of an optimizer; whoever reads or changes them finds them after all steps."""

    def __init__(self, states: Mapping[Any, dict[str, Any]], state: ModuleState) -> None:
        self._states, self._state = defaultdict(dict, states), state

    @property
    def data(self) -> defaultdict[Any, dict[str, Any]]:  # type: ignore[override]
        """The states, for a method of a dict; code of the user may keep what it returns."""
        self._state.look()
        frame: Any = sys._getframe(1)
        while (caller := frame.f_globals.get("__name__", "")) in _DICTS:
            frame = frame.f_back
        if self._state.gives_memory is not None and caller.partition(".")[0] not in _LIBRARIES:
            self._state.gives_memory()
        return self._states

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return self.data[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict: a key that is not there is not made."""
        return self.data.get(key, default)

    def copy(self) -> Any:
        """As of a dict."""
        return self.data.copy()

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.data))


_DICTS = ("collections", "collections.abc", __name__)
"""Modules in which the methods of the states are written."""
_LIBRARIES = ("zeroshard", "torch", "bitsandbytes")
"""Packages that keep no states of an optimizer."""
