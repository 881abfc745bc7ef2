"""Profiles the steps of an engine on this rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from zeroshard.comm import streams
from zeroshard.comm.streams import Clock
from zeroshard.comm.watch.status import RankStatus, Wait
from zeroshard.engine import Engine
from zeroshard.internals.autograd import is_in_backward
from zeroshard.memory.report import MemoryReport, measure
from zeroshard.parallel.pipeline.actions import Kind, parse_action
from zeroshard.profiling.report import OTHER, Label, MemoryWatch, PhaseTimeline, Profile, describe
from zeroshard.sharded import Sharded
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
    if not isinstance(engine, Engine | Sharded):
        raise TypeError(f"expected an engine, or a model of zeroshard.shard, got {type(engine).__name__}")
    if peak_flops is not None and not peak_flops > 0:
        raise ValueError(f"peak_flops: expected a number above 0, got {peak_flops!r}")
    result = Profile(peak_flops=peak_flops)
    with ExitStack() as stack:
        if operations:
            result.operations = stack.enter_context(torch.profiler.profile(profile_memory=True))
        recorder = PhaseRecorder(engine, result, notes_memory=memory, counts_flops=flops)
        recorder.attach()
        stack.callback(recorder.detach)  # after an exception, too: the memory shows why there was none left
        yield result


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
        engine: an engine, or a sharded model.
        result: gets the timeline, the samples and the operations when the recorder is detached.
        notes_memory: take a sample of the memory at the begin of each phase.
        counts_flops: count the operations up to the end of the first step.
    """

    def __init__(
        self, engine: Engine | Sharded, result: Profile, *, notes_memory: bool, counts_flops: bool
    ) -> None:
        self._engine, self._runtime, self._result = engine, engine._runtime, result
        self._thread = threading.get_ident()
        self._replaced: list[tuple[Any, str]] = []
        self._is_stepping = self._has_stepped = False
        self._watch = MemoryWatch(self._runtime, self._measure(), self._count_bytes) if notes_memory else None
        self._range = ExitStack()
        """The phase under way, as a range of torch's profiler."""
        self._counter: Any = None
        if counts_flops:
            from zeroshard.profiling.flops import FlopCounter  # it registers operations of torch.jit

            self._counter = FlopCounter(self._is_beside)

    def attach(self) -> None:
        """Begin to note.

        Raises:
            RuntimeError: another profile of this engine is under way.
        """
        status = self._runtime.here
        if type(status) is not RankStatus:
            raise RuntimeError("another profile of this engine is under way: end it before")
        if self._counter is not None:
            self._counter.begin()
        # The time that profilers take to begin and to end is no time of steps.
        self._clock, self._began = Clock(self._runtime.context.device), time.perf_counter()
        self._timeline = PhaseTimeline(self._clock.now)
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
        """Leave all as it was, and fill the result."""
        timeline, ends = self._timeline, self._timeline.ends
        timeline.cut()
        self._runtime.here.__class__ = RankStatus
        for holder, verb in self._replaced:
            delattr(holder, verb)
        self._replaced.clear()
        self._range.close()
        if self._counter is not None:
            self._counter.stop()
        first = ends[0] if self._counter is not None and ends else 0
        self._result.fill(timeline, self._clock.seconds(timeline.moments), first)
        if self._watch is not None:
            self._result.samples = self._watch.samples

    def _measure(self) -> MemoryReport:
        """The memory at rest; of a sharded model it is without the states of its optimizers."""
        engine = self._engine
        return engine.memory_report() if isinstance(engine, Engine) else measure(self._runtime, None)

    def _count_bytes(self) -> int:
        device = self._runtime.context.device
        if streams.has_streams(device):
            return torch.accelerator.memory_allocated(device)
        import psutil  # when a profile is asked for, not with the package

        return int(psutil.Process().memory_info().rss)

    def _is_beside(self) -> bool:
        """True in an optimizer's step, and inside an action of a pipeline that runs forwards once more."""
        text = self._runtime.here.action.partition(" ")[0]
        recomputes = bool(text) and parse_action(text).kind is Kind.RECOMPUTE
        return recomputes or self._timeline.phase.kind == "step"

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
            self._end_step()
        self._is_stepping, self._has_stepped = phase == _STEP, False

    def act(self, action: str) -> None:
        """Note the begin of an action of a pipeline; the forwards in it may name no unit."""
        if self._is_here:
            text = action.partition(" ")[0]
            kind = _ACTIONS.get(parse_action(text).kind) if text else None
            self._begin(OTHER if kind is None else Label(kind, f"action {text}"))

    def _begin(self, phase: Label) -> None:
        self._timeline.enter(phase)
        if self._watch is not None:
            self._watch.take(time.perf_counter() - self._began, phase)
        if self._result.operations is not None:
            self._range.close()
            self._range.enter_context(record_function(f"zeroshard: {describe(phase)}"))

    def _end_step(self) -> None:
        self._timeline.end_step()
        if self._counter is not None and (found := self._counter.stop()) is not None:
            self._result.flops, self._result.model_flops = found.all, found.of_model
        if self._watch is not None and len(self._timeline.ends) == 1:
            self._watch.note_states(self._measure())

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
    told: dict[str, Callable[[Any], None]] = {"wait": recorder.wait, "action": recorder.act}

    def enter(status: RankStatus, phase: str, where: str = "") -> None:
        RankStatus.enter(status, phase, where)
        recorder.enter(phase, where)

    def note(status: RankStatus, name: str, value: Any) -> None:
        is_new = value is not getattr(status, name)
        object.__setattr__(status, name, value)
        if is_new and name in told:
            told[name](value)

    return type("Telling", (RankStatus,), {"__slots__": (), "enter": enter, "__setattr__": note})
