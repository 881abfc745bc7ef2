"""Profiles the steps of an engine on this rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from zeroshard.comm.streams import Clock
from zeroshard.comm.watch.status import RankStatus, Wait
from zeroshard.engine import Engine
from zeroshard.internals.autograd import is_in_backward
from zeroshard.memory.report import MemoryReport, measure
from zeroshard.parallel.pipeline.actions import Kind, parse_action
from zeroshard.profiling.report import OTHER, Label, MemoryWatch, PhaseTimeline, Profile, describe
from zeroshard.sharded import Sharded
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit, UnitState


@contextmanager
def profile(
    engine: Engine | Sharded,
    *,
    memory: bool = True,
    operations: bool = False,
    flops: bool = False,
    peak_flops: float | None = None,
) -> Iterator[Profile]:
    """Note where the time and the memory of the steps inside go, on this rank.

        with zeroshard.profile(engine) as profile:
            for batch in batches:
                engine.train_batch(*batch)
        print(profile)

    Each rank profiles itself; nothing is exchanged. An engine that is not profiled has no cost of it. Times
    are the host's on a CPU, and the compute stream's on an accelerator: there a wait is the time in which
    that stream stands still for a gather or a reduction.

    Args:
        engine: an engine, or a sharded model.
        memory: note the memory at the begin of each phase.
        operations: run `torch.profiler`, too, with our phases as ranges; `profile.operations` is its
            profile, with `key_averages()` and `export_chrome_trace(path)`. This takes time of its own.
        flops: count the floating-point operations of the first step: all matrix products and attention
            that run, and the model's operations among them. It runs slower, so the times begin after it, and
            at least two steps are needed.
        peak_flops: floating-point operations per second that the device could do, above 0, for the
            utilization.

    Yields:
        The profile, which is filled at the end of the block, also by an exception.

    Raises:
        TypeError: `engine` is none, and no sharded model.
        ValueError: `peak_flops` is not above 0.
        RuntimeError: another profile of this engine is under way.
    """
    _check(engine, peak_flops)
    runtime, result = engine._runtime, Profile(peak_flops=peak_flops)
    watch = MemoryWatch(runtime, _measure(engine)) if memory else None
    ranges = ExitStack() if operations else None
    """The phase under way, as a range of torch's profiler."""

    def is_beside() -> bool:
        return timeline.phase.kind == "step" or _recomputes(runtime)

    counter = _flop_counter(is_beside) if flops else None

    def on_phase(phase: Label) -> None:
        if watch is not None:
            watch.take(time.perf_counter() - began, phase)
        if ranges is not None:
            ranges.close()
            ranges.enter_context(record_function(f"zeroshard: {describe(phase)}"))

    def on_step() -> None:
        if counter is not None and (found := counter.stop()) is not None:
            result.flops, result.model_flops = found.all, found.of_model
        if watch is not None and len(timeline.ends) == 1:
            watch.note_states(_measure(engine))

    def fill() -> None:
        timeline.cut()
        recorder.detach()
        first = 0 if counter is None or not timeline.ends else timeline.ends[0]
        result.fill(timeline, clock.seconds(timeline.moments), first)
        if watch is not None:
            result.samples = watch.samples

    with ExitStack() as stack:
        if ranges is not None:
            result.operations = stack.enter_context(_torch_profile(runtime.context.device))
            stack.callback(ranges.close)
        if counter is not None:
            stack.callback(counter.stop)
            counter.begin()
        # The time that profilers take to begin and to end is no time of steps.
        clock, began = Clock(runtime.context.device), time.perf_counter()
        timeline = PhaseTimeline(clock.now)
        recorder = PhaseRecorder(runtime, timeline, on_phase, on_step)
        recorder.attach()
        stack.callback(fill)  # after an exception, too: the memory shows why there was none left
        yield result


def _check(engine: object, peak_flops: float | None) -> None:
    if not isinstance(engine, Engine | Sharded):
        raise TypeError(f"expected an engine, or a model of zeroshard.shard, got {type(engine).__name__}")
    if peak_flops is not None and not peak_flops > 0:
        raise ValueError(f"peak_flops: expected a number above 0, got {peak_flops!r}")


def _measure(engine: Engine | Sharded) -> MemoryReport:
    """The memory at rest; of a sharded model it is without the states of its optimizers."""
    return engine.memory_report() if isinstance(engine, Engine) else measure(engine._runtime, None)


def _flop_counter(is_beside: Callable[[], bool]) -> Any:
    from zeroshard.profiling.flops import FlopCounter  # torch's module registers operations of torch.jit

    return FlopCounter(is_beside)


def _recomputes(runtime: Runtime) -> bool:
    """True inside an action of a pipeline that runs forwards once more."""
    text = runtime.here.action.partition(" ")[0]
    return bool(text) and parse_action(text).kind is Kind.RECOMPUTE


def _torch_profile(device: torch.device) -> Any:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, profile_memory=True)


# ------------------------------------------------------------------------------------------ the recorder

_STEP = "the optimizer step"
_PHASES = {"the forward of ": "forward", "the backward of ": "backward", _STEP: "step"}
_ACTIONS = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "backward",
    Kind.WEIGHT_GRADIENT: "backward",
    Kind.UNSHARD: "gather",
    Kind.RESHARD: "free",
    Kind.REDUCE: "reduce",
}


def _never(unit: Unit) -> bool:
    return False


_VERBS: dict[str, tuple[str, str, Callable[[Unit], bool]]] = {
    "unshard": ("gather", "", lambda unit: unit.state is not UnitState.SHARDED),
    "wait": ("wait", "gather of ", lambda unit: unit.state is UnitState.UNSHARDED),
    "reshard": ("free", "", lambda unit: unit.is_resident or unit.state is UnitState.SHARDED),
    "start_reduce": ("reduce", "", _never),
    "wait_reduce": ("wait", "reduction of ", _never),
    "progress_reduce": ("reduce", "", _never),
}
"""For each verb of a unit its kind, the text before the name of the unit, and a function that is true if a
call has nothing to do."""


class PhaseRecorder:
    """Feeds a timeline from the runtime of an engine while it is attached; a detached one costs nothing.

        the status of the rank     forward and backward of a unit, optimizer step, waits of the host
        verbs of a unit            gather, free, reduce, the wait of compute for a gather
        gradients                  packing and delivery
        buffers                    copies between tiers and dtypes; on a CPU, where the host copies
        runtime                    the end of a step

    Both are noted from outside: the status gets a class that calls the recorder, and the verbs of each unit
    are replaced in the object, which `detach` undoes.

    Args:
        runtime: the runtime.
        timeline: gets phases and tasks.
        on_phase: called after the begin of each phase.
        on_step: called after the end of each step.
    """

    def __init__(
        self,
        runtime: Runtime,
        timeline: PhaseTimeline,
        on_phase: Callable[[Label], None],
        on_step: Callable[[], None],
    ) -> None:
        self._runtime, self._timeline = runtime, timeline
        self._on_phase, self._on_step = on_phase, on_step
        self._thread = threading.get_ident()
        self._replaced: list[tuple[Any, str]] = []
        self._is_stepping = self._has_stepped = False

    def attach(self) -> None:
        """Begin to note.

        Raises:
            RuntimeError: another profile of this engine is under way.
        """
        status = self._runtime.here
        if type(status) is not RankStatus:
            raise RuntimeError("another profile of this engine is under way: end it before")
        status.__class__ = _telling(self)
        for unit in self._runtime.units:
            for verb, (kind, name, is_idle) in _VERBS.items():
                self._replace(unit, verb, Label(kind, name + unit.described), is_idle)
            for gradients in unit.gradients:
                for verb in ("pack", "deliver"):
                    self._replace(gradients, verb, Label("reduce", unit.described), _never)
            # The streams of an accelerator copy during compute, which notes nothing of it.
            for buffer in unit.buffers if self._runtime.context.device.type == "cpu" else ():
                self._replace(buffer.source, "load", Label("copy", unit.described), _never)
        self._note_steps()

    def detach(self) -> None:
        """Leave all as it was."""
        self._runtime.here.__class__ = RankStatus
        for holder, verb in self._replaced:
            delattr(holder, verb)
        self._replaced.clear()

    def _note_steps(self) -> None:
        """Note each step that ends: not one that fails, nor one that another optimizer is to go on with."""
        runtime, after_step = self._runtime, self._runtime.after_step

        def noted(stepped: Any = (), is_last: bool = True) -> None:
            after_step(stepped, is_last)
            self._has_stepped = is_last

        runtime.after_step = noted  # type: ignore[method-assign]
        self._replaced.append((runtime, "after_step"))

    def _replace(self, holder: Any, verb: str, label: Label, is_idle: Callable[[Any], bool]) -> None:
        call, timeline = getattr(holder, verb), self._timeline

        def noted(*args: Any, **kwargs: Any) -> Any:
            if is_idle(holder) or not self._is_here:
                return call(*args, **kwargs)
            timeline.begin(label)
            try:
                return call(*args, **kwargs)
            finally:
                timeline.end()

        setattr(holder, verb, noted)
        self._replaced.append((holder, verb))

    @property
    def _is_here(self) -> bool:
        """True in the program's thread, and in the thread of its backward, for which the program waits."""
        return threading.get_ident() == self._thread or is_in_backward()

    # -- told by the status ---------------------------------------------------------------------------

    def enter(self, phase: str, where: str) -> None:
        """Note the begin of a phase, as `RankStatus.enter` has it."""
        if not self._is_here:
            return
        self._begin(Label(_PHASES[phase], where) if phase else OTHER)
        # A class whose step calls the step of its base takes one step: torch calls the hooks of both.
        if self._is_stepping and self._has_stepped:
            self._timeline.end_step()
            self._on_step()
        self._is_stepping, self._has_stepped = phase == _STEP, False

    def act(self, action: str) -> None:
        """Note the begin of an action of a pipeline; the forwards in it may name no unit."""
        if self._is_here:
            text = action.partition(" ")[0]
            kind = _ACTIONS.get(parse_action(text).kind) if text else None
            self._begin(OTHER if kind is None else Label(kind, f"action {text}"))

    def _begin(self, phase: Label) -> None:
        self._timeline.enter(phase)
        self._on_phase(phase)

    def wait(self, wait: Wait | None) -> None:
        """Note the begin of a wait of the host, or its end."""
        if not self._is_here:
            return
        if wait is None:
            self._timeline.end()
        else:
            self._timeline.begin(Label("wait", wait.label))


def _telling(recorder: PhaseRecorder) -> type[RankStatus]:
    """Return a class of statuses that tell a recorder of what is noted in them."""
    slots = vars(RankStatus)

    def enter(status: RankStatus, phase: str, where: str = "") -> None:
        RankStatus.enter(status, phase, where)
        recorder.enter(phase, where)

    def set_wait(status: RankStatus, wait: Wait | None) -> None:
        if wait is not slots["wait"].__get__(status):
            recorder.wait(wait)
        slots["wait"].__set__(status, wait)

    def set_action(status: RankStatus, action: str) -> None:
        slots["action"].__set__(status, action)
        recorder.act(action)

    changed = {
        "enter": enter,
        "wait": property(slots["wait"].__get__, set_wait),
        "action": property(slots["action"].__get__, set_action),
    }
    return type("Telling", (RankStatus,), {"__slots__": (), **changed})
