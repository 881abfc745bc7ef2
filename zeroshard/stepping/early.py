"""Steps during the backward: a unit is stepped as soon as its gradient is reduced, and the gradient goes.

So the gradients of a few units exist at a time, and the step of a tier runs during the backward. Results are
the same as with a step after the backward, if there is one backward for each micro-batch. The backward of the
last micro-batch steps. A unit is left to `optimizer.step()` if this rank has no gradient for a part of it, or
if its gradient may come in several parts.

With an accelerator, units in files, which the host steps, have a thread of their own. The thread of the
backward goes on to launch kernels:

    backward   hands a unit over, with the marks of the copies of its gradients to the host
    worker     waits for these copies, and for copies out of the main parameters; steps; writes back; starts
               the copy to the device, on the stream `to_device`
    gather     the next one of the unit waits for that copy

All other units are stepped by the thread of the backward, which is ordered with compute: the device steps
those on the host, too (see `stored.py`). On CPU ranks the backward itself needs the cores.

The thread takes the steps in the order in which units are handed over:

    backward   |-- unit 3 --|-- unit 2 --|-- unit 1 --|-- unit 0 --| finish
    worker                  |-- step 3 --|-- step 2 --|-- step 1 --|-- step 0 --|

The thread begins with the first unit. It ends with its owner, or at the end of the interpreter.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zeroshard.comm import streams
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import warn_user
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.stepping.clipping import has_hooks_of_others
from zeroshard.stepping.guard import InterruptedStep
from zeroshard.stepping.parts import StepByParts, is_divisible

MOST_UNDER_WAY = 2
"""Units that may be handed over and not stepped yet: one is stepped, one waits. So few gradients exist."""


class Worker:
    """Does work in a thread of its own, piece by piece. Nothing is begun after a piece has failed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-step")
        self._under_way: deque[Future[None]] = deque()
        self._failure = Event()
        """Set when a piece has failed; each run of pieces has its own, until `finish` or `cancel`."""

    def give(self, work: Callable[[], None]) -> Callable[[], object]:
        """Hand work over; wait for older work while too much of it is under way.

        Returns:
            A call that waits until the work is over, and raises nothing.

        Raises:
            BaseException: the error of earlier work, with its traceback.
        """
        while self._under_way and (len(self._under_way) >= MOST_UNDER_WAY or self._under_way[0].done()):
            wait((self._under_way[0],))
            self._under_way.popleft().result()
        future = self._thread.submit(_do, work, self._failure)
        self._under_way.append(future)
        return lambda: wait((future,))

    def finish(self) -> None:
        """Wait until all work is over.

        Raises:
            BaseException: the first error of the work, with its traceback.
        """
        try:
            wait(self._under_way)
        except BaseException:  # Ctrl-C: nobody may go on while the thread runs
            self.cancel()
            raise
        done, self._under_way, self._failure = self._under_way, deque(), Event()
        for future in done:
            future.result()

    def cancel(self) -> None:
        """Cancel the work that has not begun, wait for the other work, and drop its errors."""
        self._failure.set()
        left, self._under_way, self._failure = self._under_way, deque(), Event()  # Ctrl-C may end the wait
        wait(left)


def _do(work: Callable[[], None], failure: Event) -> None:
    if failure.is_set():
        return
    try:
        work()
    except BaseException:
        failure.set()
        raise


class EarlySteps:
    """A context around the backward that steps. At its end all units are stepped that were begun.

    Args:
        runtime: the runtime of the parameters.
        optimizer: the optimizer of the engine.
        parts: its steps by part.
        halfway: the mark of a step that has begun.

    Raises:
        ValueError: the optimizer steps all of its parameters at once.
    """

    def __init__(
        self, runtime: Runtime, optimizer: Optimizer, parts: Sequence[StepByParts], halfway: InterruptedStep
    ) -> None:
        if not is_divisible(optimizer):
            raise ValueError(
                f"offload.step_in_backward: expected an optimizer of torch, zeroshard or bitsandbytes that "
                f"steps each element by itself, got {type(optimizer).__name__}"
            )
        self._reducer, self._optimizer, self._halfway = runtime.reducer, weakref.ref(optimizer), halfway
        self._state, self._to_device = runtime.context.state, runtime.context.streams.to_device
        (self._parts,) = parts
        self._worker = Worker() if streams.has_streams(runtime.context.device) else None
        self._handed_over: list[Unit] = []
        self._options: list[dict[str, Any]] = []
        """The options of each group with which units were stepped."""

    def __enter__(self) -> None:
        self._check_backward()
        self._reducer.check_begin()
        optimizer = self._optimizer()
        assert optimizer is not None, "the engine holds it"
        if has_hooks_of_others(optimizer):
            warn_user(
                "offload.step_in_backward: a hook of register_step_pre_hook() runs after units were "
                "stepped, so it finds no gradients of them, and what it does to gradients has no effect"
            )
        self._options = _options(optimizer)
        self._parts.begin_units()
        self._reducer.step_unit = self._step

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._reducer.step_unit = None
        has_ended = False
        try:
            if self._worker is not None:
                self._worker.finish() if exc_type is None else self._worker.cancel()
            has_ended = exc_type is None
        finally:
            handed_over, self._handed_over = self._handed_over, []
            for unit in handed_over:
                unit.step_under_way = object
            optimizer = self._optimizer()
            if self._state.is_in_step and optimizer is not None:  # on all ranks: any may have stepped units
                self._halfway.begin()
                self._state.has_failed_in_step = not has_ended

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
        if self._state.has_failed_in_step:
            raise RuntimeError(
                "a backward has ended in an exception after it began to step units: some may have been "
                "stepped and others have not. Load the last checkpoint with engine.load_checkpoint()"
            )

    def end(self) -> bool:
        """Note the end of the step, or a load; return True, on all ranks alike, if a backward began it."""
        is_in_step = self._state.is_in_step
        self._state.has_failed_in_step = self._state.is_in_step = False
        return is_in_step

    def _step(self, unit: Unit) -> None:
        """Step a unit whose gradients are reduced, or hand it over to the worker."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the engine holds it"
        self._halfway.begin()
        deliver = [gradients.hand_over() for gradients in unit.gradients]
        parameters = {p for gradients in unit.gradients for p in gradients.buffer.sharded}
        step = self._parts.step_of(optimizer, parameters, deliver)
        if self._worker is None or all(g.buffer.plan.main_tier is not Tier.DISK for g in unit.gradients):
            with torch.no_grad(), past_guards():
                step()
            for gradients in unit.gradients:
                # Kernels may count no version. A later use of these values in the backward is torch's error.
                if gradients.buffer.plan.is_alias:
                    increment_version(gradients.buffer.unsharded)
            return

        def take() -> None:
            self._to_device.use_here()
            for gradients in unit.gradients:
                gradients.buffer.source.await_copies()
            with torch.no_grad(), past_guards():
                step()

        unit.step_under_way = self._worker.give(take)
        self._handed_over.append(unit)


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
