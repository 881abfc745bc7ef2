"""Profiles the steps of an engine on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from zeroshard.comm.streams import Clock
from zeroshard.memory.report import MemoryReport, measure
from zeroshard.profiling.memory import MemoryWatch
from zeroshard.profiling.recorder import Recorder
from zeroshard.profiling.report import Profile, describe
from zeroshard.profiling.timeline import Label, Timeline
from zeroshard.reports import Reports
from zeroshard.sharded import ShardedCalls


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
            that run, recomputed ones too. It runs slower, so the times begin after it, and at least two steps
            are needed.
        peak_flops: floating-point operations per second that the device could do, for the utilization.

    Yields:
        The profile, which is filled at the end of the block, also by an exception.

    Raises:
        RuntimeError: another profile of this engine is under way.
    """
    runtime, result = engine._runtime, Profile(peak_flops=peak_flops)
    watch = MemoryWatch(runtime, _measure(engine)) if memory else None
    ranges = _Ranges() if operations else None
    counting = _Counting() if flops else None

    def on_phase(phase: Label) -> None:
        if watch is not None:
            watch.take(time.perf_counter() - began, phase)
        if ranges is not None:
            ranges.enter(phase)

    def on_step() -> None:
        if counting is not None:
            counting.end_step()
        if watch is not None and len(timeline.ends) == 1:
            watch.note_states(_measure(engine))

    def fill() -> None:
        timeline.close()
        recorder.detach()
        first = 0 if counting is None or not timeline.ends else timeline.ends[0]
        result.fill(timeline, clock.seconds(timeline.moments), first)
        if watch is not None:
            result.samples, result.peak = watch.samples, watch.peak
        if counting is not None:
            result.flops = counting.flops

    with ExitStack() as stack:
        if ranges is not None:
            result.operations = stack.enter_context(_torch_profile(runtime.context.device))
            stack.callback(ranges.end)
        if counting is not None:
            stack.callback(counting.stop)
            counting.begin()
        # The time that profilers take to begin and to end is not that of steps.
        clock, began = Clock(runtime.context.device), time.perf_counter()
        timeline = Timeline(clock.now)
        recorder = Recorder(runtime, timeline, on_phase, on_step)
        recorder.attach()
        stack.callback(fill)  # after an exception, too: the memory tells why there was none left
        yield result


def _measure(engine: ShardedCalls) -> MemoryReport:
    """The memory at rest; that of a sharded model is without the states of its optimizers."""
    return engine.memory_report() if isinstance(engine, Reports) else measure(engine._runtime, None)


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


class _Counting:
    """Counts the floating-point operations up to the end of the first step."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        aten, own = torch.ops.aten, dict[Any, Any]()
        for kernel in _KERNELS_OF_ATTENTION:
            own[getattr(aten, f"_scaled_dot_product_{kernel}")] = _operations_of_attention
            own[getattr(aten, f"_scaled_dot_product_{kernel}_backward")] = _operations_of_its_backward
        self._mode: Any = FlopCounterMode(display=False, custom_mapping=own)
        self._is_on = False
        self.flops: int | None = None

    def begin(self) -> None:
        """Begin to count."""
        self._mode.__enter__()
        self._is_on = True

    def stop(self) -> None:
        """Stop to count; a second call does nothing."""
        if self._is_on:
            self._is_on = False
            self._mode.__exit__(None, None, None)

    def end_step(self) -> None:
        """Take the count of the first step."""
        if self._is_on:
            self.stop()
            self.flops = self._mode.get_total_flops()


_KERNELS_OF_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
"""torch counts those of GPUs alone; torch 2.11 refuses queries with more heads than keys have."""


def _operations_of_attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Two products, of queries with keys and of scores with values; all are [batch, heads, length, size]."""
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def _operations_of_its_backward(
    _: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *__: Any, **___: Any
) -> int:
    """Five products: the scores once more, and the gradients of values, scores, queries and keys."""
    return 2 * prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])
