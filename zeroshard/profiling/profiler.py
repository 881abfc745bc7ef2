"""Profiles the steps of an engine on this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, record_function

from zeroshard.comm.streams import Clock
from zeroshard.memory.report import MemoryReport, measure
from zeroshard.parallel.pipeline.actions import Kind, parse_action
from zeroshard.profiling.memory import MemoryWatch
from zeroshard.profiling.recorder import Recorder
from zeroshard.profiling.report import Profile, describe
from zeroshard.profiling.timeline import Label, Timeline
from zeroshard.reports import Reports
from zeroshard.sharded import ShardedCalls
from zeroshard.sharding.runtime import Runtime

if TYPE_CHECKING:
    from zeroshard.profiling.flops import FlopCounter


@contextmanager
def profile(
    engine: ShardedCalls,
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
    are those of the host on a CPU, and those of the compute stream on an accelerator: there a wait is the
    time in which that stream stands still for a gather or a reduction.

    Args:
        engine: an engine, or a sharded model.
        memory: note the memory at the begin of each phase.
        operations: run `torch.profiler` beside, with our phases as ranges; `profile.operations` is its
            profile, with `key_averages()` and `export_chrome_trace(path)`. This takes time of its own.
        flops: count the floating-point operations of the first step: those of matrix products and attention
            that run, and those of the model among them. It runs slower, so the times begin after it, and at
            least two steps are needed.
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
    ranges = _Ranges() if operations else None

    def is_beside() -> bool:
        return timeline.phase.kind == "step" or _recomputes(runtime)

    counter = _flop_counter(is_beside) if flops else None

    def on_phase(phase: Label) -> None:
        if watch is not None:
            watch.take(time.perf_counter() - began, phase)
        if ranges is not None:
            ranges.enter(phase)

    def on_step() -> None:
        if counter is not None and (found := counter.stop()) is not None:
            result.flops, result.model_flops = found.all, found.of_model
        if watch is not None and len(timeline.ends) == 1:
            watch.note_states(_measure(engine))

    def fill() -> None:
        timeline.close()
        recorder.detach()
        first = 0 if counter is None or not timeline.ends else timeline.ends[0]
        result.fill(timeline, clock.seconds(timeline.moments), first)
        if watch is not None:
            result.samples, result.peak = watch.samples, watch.peak

    with ExitStack() as stack:
        if ranges is not None:
            result.operations = stack.enter_context(_torch_profile(runtime.context.device))
            stack.callback(ranges.end)
        if counter is not None:
            stack.callback(counter.stop)
            counter.begin()
        # The time that profilers take to begin and to end is not that of steps.
        clock, began = Clock(runtime.context.device), time.perf_counter()
        timeline = Timeline(clock.now)
        recorder = Recorder(runtime, timeline, on_phase, on_step)
        recorder.attach()
        stack.callback(fill)  # after an exception, too: the memory tells why there was none left
        yield result


def _check(engine: object, peak_flops: float | None) -> None:
    if not isinstance(engine, ShardedCalls):
        raise TypeError(f"expected an engine, or a model of zeroshard.shard, got {type(engine).__name__}")
    if peak_flops is not None and not peak_flops > 0:
        raise ValueError(f"peak_flops: expected a number above 0, got {peak_flops!r}")


def _measure(engine: ShardedCalls) -> MemoryReport:
    """The memory at rest; that of a sharded model is without the states of its optimizers."""
    return engine.memory_report() if isinstance(engine, Reports) else measure(engine._runtime, None)


def _flop_counter(is_beside: Callable[[], bool]) -> FlopCounter:
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


class _Ranges:
    """Shows phases as ranges of torch's profiler, one after the other."""

    def __init__(self) -> None:
        self._range: Any = None

    def enter(self, phase: Label) -> None:
        """End the range under way, and begin the next."""
        self.end()
        self._range = record_function(f"zeroshard: {describe(phase)}")
        self._range.__enter__()

    def end(self) -> None:
        """End the range under way."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
