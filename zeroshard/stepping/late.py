"""Steps of an optimizer that wait for the next forward: each unit is stepped just before its use there.

    step()      takes gradients and options, and gives each unit its step
    compute     | step 0 | forward 0 | step 1 | forward 1 | step 2 | forward 2 |
    copies      | states 1 up        | states 2 up, 0 down | states 3 up, 1 down

So values on the host travel along with a forward. Values are those of a step at once. Three kinds of work are
left for later. Three calls do them; each does also what the one above it does:

    left by         done by              called before
    step_later      take_all             the next step
    scale_later     scale_gradients      a norm, and a backward, which adds to gradients
    wait_later      before_look          somebody looks at parameters, gradients or states from outside

A tensor over the memory of a parameter, as `p.data`, could be read unseen. Once somebody has one, steps no
longer wait; nor after a read of `optimizer.state`. Nor does a step whose gradients somebody holds.
"""

from __future__ import annotations

import sys
import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
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

Call = Callable[[], object]
Pairs = list[tuple[ShardedParameter, Tensor | None]]
"""Parameters with their gradients."""


class LateSteps(Steps):
    """The steps of one optimizer that wait for a forward; the methods of `Steps` have their meaning there.

    Args:
        runtime: the runtime of the parameters.
        optimizer: the optimizer, which steps each parameter by itself.
    """

    def __init__(self, runtime: Runtime, optimizer: Optimizer) -> None:
        self._state, self._device = runtime.state, runtime.context.device
        self._runtime = weakref.ref(runtime)  # the optimizer holds this
        runtime.state.can_wait = True
        self._left: dict[Unit, list[Call]] = {}
        """The step of each unit that no forward has reached, and what follows it."""
        self._end: Call = object
        """Ends the step whose parts wait, or have waited since the last `take_all`."""
        self._num_modes = 0
        """The modes of torch's dispatch around that step."""
        self._unscaled: Pairs = []
        """Gradients on the host that are still to be multiplied by the factor of the state."""
        self._waits: dict[Call, None] = {}
        """Let the host wait for values of the last step, and for gradients; none: all are at rest."""
        self._watch(optimizer)
        # Its tensors may be kept.
        optimizer.register_state_dict_pre_hook(lambda _: self._state.steps.never_wait())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.before_look())
        optimizer.register_load_state_dict_post_hook(self._watch)

    def _watch(self, optimizer: Optimizer) -> None:
        """Notice who reads the states; a load puts others into the place of them."""
        states: Any = optimizer.state
        if not isinstance(states, _LateStates):
            optimizer.state = _LateStates(states, self._state)  # type: ignore[assignment]

    def _units(self) -> dict[str, Unit]:
        """The units by name; none if the runtime is gone."""
        runtime = self._runtime()
        return {} if runtime is None else {unit.name: unit for unit in runtime.units}

    def _may_wait(self) -> bool:
        """True if nobody looks unseen, and no backwards are under way, as in an asynchronous pipeline."""
        state = self._state
        return state.can_wait and not state.has_shown_gradients and Moment.BATCH not in state.moments

    def never_wait(self) -> None:
        self._state.can_wait = False
        self.before_look()

    # -- what is left for later -----------------------------------------------------------------------

    def prepare(self, optimizer: Optimizer, parts: list[tuple[Any, list[ShardedParameter]]]) -> None:
        self._watch(optimizer)
        # No rank waits for others in the step, whatever the order of its parts.
        positions = {name: unit.position for name, unit in self._units().items()}
        parts.sort(key=lambda part: positions.get(part[1][0].unit_name, -1) if part[1] else -1)

    def step_later(self, parts: Sequence[tuple[list[ShardedParameter], Call]], end: Call, wait: Call) -> bool:
        units = self._units()
        if not units or not self._may_wait():
            return False
        for parameters, step in parts:
            if parameters:
                gradients = [(p, gradient_of(p)) for p in parameters]
                calls = self._left.setdefault(units[parameters[0].unit_name], [])
                calls.append(partial(_step_with, gradients, step))
            else:
                step()
        for unit in self._left:
            unit.wait_for_step(lambda unit=unit: self._step(unit))  # type: ignore[misc]
        self._end, self._waits[wait] = end, None
        self._num_modes = torch._C._len_torch_dispatch_stack()
        if not self._left:
            self.take_all()
        return True

    def scale_later(self, gradients: Pairs, factor: Tensor) -> bool:
        if not self._may_wait():
            return False
        self._unscaled, self._state.factor = gradients, factor
        return True

    def wait_later(self, wait: Call) -> bool:
        if Moment.BATCH in self._state.moments:
            return False
        self._waits[wait] = None
        return self._may_wait()

    def follow(self, unit_name: str, call: Call) -> None:
        calls = next((calls for unit, calls in self._left.items() if unit.name == unit_name), None)
        if calls is None:
            call()
        else:
            calls.append(call)

    # -- what is done of it ---------------------------------------------------------------------------

    def take_all(self) -> None:
        while self._left:
            self._step(next(iter(self._left)))
        end, self._end = self._end, object
        self._run(end)

    def scale_gradients(self) -> None:
        self.take_all()  # with gradients that are not scaled
        factor, self._state.factor = self._state.factor, None
        present = [g for p, g in self._unscaled if g is not None and gradient_of(p) is g]
        self._unscaled = []
        if factor is not None and present:
            self._wait()
            scale_(present, factor)

    def before_look(self) -> None:
        self.scale_gradients()
        self._wait()

    def _wait(self) -> None:
        waits, self._waits = self._waits, {}
        for wait in waits:
            wait()

    def _step(self, unit: Unit) -> None:
        """Take the step of a unit, in the modes of nobody's forward."""
        no_cast = torch.autocast(self._device.type, enabled=False)
        unit.step_under_way = object
        with ExitStack() as modes, torch.inference_mode(False), torch.no_grad(), self.unseen(), no_cast:
            for _ in range(torch._C._len_torch_dispatch_stack() - self._num_modes):
                modes.enter_context(_pop_mode_temporarily())  # a selective checkpoint counts calls
            for call in self._left.pop(unit, ()):  # none: dropped after an exception
                self._run(call)

    def _run(self, call: Call) -> None:
        """Run a part of a step; after its exception the step has failed, and the rest of it is dropped."""
        try:
            call()
        except BaseException:
            self._left, self._end = {}, object
            self._state.fail_step()
            raise

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """The context in which an optimizer steps: nobody looks, so the state has the plain `Steps`."""
        state = self._state
        before = state.steps, state.has_shown_gradients
        state.steps = Steps()
        try:
            with past_guards():
                yield
        finally:
            state.steps, state.has_shown_gradients = before


def _step_with(gradients: Pairs, step: Call) -> None:
    """Take a step with the gradients of its time; a later backward may have set others, which stay."""
    present = [(p, gradient_of(p)) for p, _ in gradients]
    set_gradients(gradients)
    try:
        step()
    finally:
        set_gradients(present)


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
        self._state.steps.before_look()
        frame: Any = sys._getframe(1)
        while (caller := frame.f_globals.get("__name__", "")) in _DICTS:
            frame = frame.f_back
        if self._state.can_wait and caller.partition(".")[0] not in _LIBRARIES:
            self._state.steps.never_wait()
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
