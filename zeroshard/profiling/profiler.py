"""Profiles the steps of an engine on this rank: torch's profiler with ranges of ours, and a table of these.

    the status of the rank     forward and backward of a unit, optimizer step, waits of the host
    verbs of a unit            gather, free, reduce, the wait of compute for a gather
    gradients                  packing and delivery
    buffers                    copies between tiers and dtypes; on a CPU, where the host copies
    runtime                    the end of a step

All are noted from outside: the status gets a class that calls the recorder, and the verbs of each unit are
replaced in the object, which the end of the profile undoes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from zeroshard.comm import streams
from zeroshard.comm.watch.status import RankStatus, Wait
from zeroshard.engine import Engine
from zeroshard.internals.autograd import is_in_backward
from zeroshard.sharded import Sharded
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import UnitState
from zeroshard.tables import LINE, render

COLUMNS = ("forward", "backward", "gather", "copy", "reduce", "free", "wait", "step", "other")
"""The kinds of ranges: compute of forwards and of backwards; gathers of parameters; copies of parameters from
another tier or dtype, where the host copies; packing, adding and delivery of gradients; freeing of
parameters; waits of the host for other ranks; the optimizer; and all outside."""
_PREFIX = "zeroshard: "
"""The beginning of the name of each range: "zeroshard: gather of unit 'blocks.0'"."""
_MOST_WAITS = 4
"""Waits that the text names."""


@dataclass
class Profile:
    """The time of steps on this rank, by unit and kind; filled when the profile ends.

    Times are in seconds, those of a range without those of the ranges inside. On an accelerator they are the
    times of the kernels that a range has started, which may run at the same time as others. `str(profile)`
    has a table.
    """

    num_steps: int = 0
    """Optimizer steps that ended inside."""
    units: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of a step by unit and kind, see `COLUMNS`; a wait has the unit of the range around it."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by the collective that the rank waited for, the longest first."""
    operations: Any = None
    """The profile of `torch.profiler`, with `key_averages()` and `export_chrome_trace(path)`."""

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds of a step by kind."""
        return {kind: sum(times[kind] for times in self.units.values()) for kind in COLUMNS}

    def fill(self, num_steps: int, *, on_device: bool) -> None:
        """Add up the ranges in `operations`.

        Args:
            num_steps: optimizer steps that ended inside.
            on_device: True to add up the times of kernels, and not those of the host.
        """
        self.num_steps, share = num_steps, 1e-6 / max(1, num_steps)  # torch counts microseconds
        units: dict[str, dict[str, float]] = {}
        waits: defaultdict[str, float] = defaultdict(float)
        for event in self.operations.events():
            if not event.name.startswith(_PREFIX) or event.device_type != DeviceType.CPU:
                continue
            seconds = share * (event.device_time_total if on_device else event.cpu_time_total)
            for holder, own in ((event, seconds), (_around(event), -seconds)):
                if holder is not None:
                    (kind, unit), (_, name) = _kind_and_unit(holder), _label(holder)
                    units.setdefault(unit, dict.fromkeys(COLUMNS, 0.0))[kind] += own
                    if kind == "wait":
                        waits[name] += own
        self.units = units
        self.waits = dict(sorted(waits.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        phases = self.phases
        used = [kind for kind in COLUMNS if phases[kind]]
        total = sum(phases.values())
        rows: list[tuple[str, ...]] = [
            (unit, *(_ms(times[kind]) for kind in used), _ms(sum(times.values())))
            for unit, times in self.units.items()
        ]
        rows += [LINE, ("all", *(_ms(phases[kind]) for kind in used), _ms(total))]
        rows.append(("share", *(f"{phases[kind] / total:.1%}" for kind in used), "100.0%"))
        title = f"a step by unit, mean of {self.num_steps}, ms"
        waits = [f"wait for {name}: {_ms(time)} ms" for name, time in list(self.waits.items())[:_MOST_WAITS]]
        return "\n".join([render(title, ("unit", *used, "all"), rows), *waits])


def _label(event: Any) -> tuple[str, str]:
    """Return the kind of a range, and the unit or the collective that it is for."""
    kind, _, name = event.name.removeprefix(_PREFIX).partition(" of ")
    return kind, name


def _around(event: Any) -> Any:
    """Return the range of ours around an event; None if there is none."""
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith(_PREFIX):
        parent = parent.cpu_parent
    return parent


def _kind_and_unit(event: Any) -> tuple[str, str]:
    kind, name = _label(event)
    if kind == "wait":
        around = _around(event)
        name = "" if around is None else _kind_and_unit(around)[1]
    return kind, name or "no unit"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds else ""


@contextmanager
def profile(engine: Engine | Sharded, *, profile_memory: bool = True, **options: Any) -> Iterator[Profile]:
    """Run `torch.profiler` over the steps inside, on this rank, with ranges for the work of units.

        with zeroshard.profile(engine) as profile:
            for batch in batches:
                engine.train_batch(*batch)
        print(profile)
        profile.operations.export_chrome_trace("trace.json")

    Each rank profiles itself; nothing is exchanged. An engine that is not profiled has no cost of it. A few
    steps are enough: the profiler keeps each operation, and takes time of its own.

    Args:
        engine: an engine, or a sharded model.
        profile_memory: note the memory that operations allocate and free.
        options: further arguments of `torch.profiler.profile`, such as `with_flops`.

    Yields:
        The profile, which is filled at the end of the block, also by an exception.

    Raises:
        TypeError: there is a `schedule`.
        RuntimeError: another profile of this engine is under way.
    """
    if "schedule" in options:
        raise TypeError("zeroshard.profile() has no schedule: the block chooses the steps that are profiled")
    runtime = engine._runtime
    if type(runtime.here) is not RankStatus:
        raise RuntimeError("another profile of this engine is under way: end it before")
    recorder = _RangeRecorder(runtime)
    result = Profile(operations=torch.profiler.profile(profile_memory=profile_memory, **options))
    result.operations.start()
    try:
        with recorder:
            yield result
    finally:
        result.operations.stop()
        result.fill(recorder.num_steps, on_device=streams.has_streams(runtime.context.device))


# ------------------------------------------------------------------------------------------ the recorder

_PHASES = {
    "": "other",
    "the forward of ": "forward",
    "the backward of ": "backward",
    "the optimizer step": "step",
}
_VERBS = {
    "unshard": "gather of ",
    "wait": "wait of gather of ",
    "reshard": "free of ",
    "start_reduce": "reduce of ",
}
"""For each verb of a unit the text before the name of the unit."""
_OF_GRADIENTS = dict.fromkeys(("pack", "progress", "deliver"), "reduce of ") | {
    "wait": "wait of reduction of "
}
"""The same for the verbs of its gradients."""


class _RangeRecorder:
    """Opens ranges of torch's profiler from the runtime of an engine, while it is entered."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._thread = runtime, threading.get_ident()
        self._replaced: list[tuple[Any, str]] = []
        self._phase, self._waiting = ExitStack(), ExitStack()
        """The ranges of the phase under way, and of the wait of the host in it."""
        self.num_steps = 0

    def __enter__(self) -> None:
        runtime = self._runtime
        runtime.here.__class__ = _telling(self)
        for unit in runtime.units:
            for verb, text in _VERBS.items():
                self._replace(unit, verb, text + unit.described)
            for gradients in unit.gradients:
                for verb, text in _OF_GRADIENTS.items():
                    self._replace(gradients, verb, text + unit.described)
            # The streams of an accelerator copy during compute, which notes nothing of it.
            for buffer in unit.buffers if runtime.context.device.type == "cpu" else ():
                for store in filter(None, (buffer.store, buffer.store.copy)):
                    self._replace(store, "load", f"copy of {unit.described}")
        after_step = runtime.after_step

        def count(stepped: Any = (), is_last: bool = True) -> None:
            after_step(stepped, is_last)
            self.num_steps += is_last

        runtime.after_step = count  # type: ignore[method-assign]
        self._replaced.append((runtime, "after_step"))
        self.enter("", "")

    def __exit__(self, *_: object) -> None:
        self._runtime.here.__class__ = RankStatus
        for holder, verb in self._replaced:
            delattr(holder, verb)
        self._waiting.close()
        self._phase.close()
        # An exchange that ends after torch's profiler (2.11 to 2.14) would write into memory that is freed.
        for unit in self._runtime.units:
            if unit.state is UnitState.GATHERING:
                unit.wait()

    def _replace(self, holder: Any, verb: str, text: str) -> None:
        call = getattr(holder, verb)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if not self._is_here:
                return call(*args, **kwargs)
            with record_function(_PREFIX + text):
                return call(*args, **kwargs)

        setattr(holder, verb, noted)
        self._replaced.append((holder, verb))

    @property
    def _is_here(self) -> bool:
        """True in the program's thread, and in the thread of its backward, for which the program waits."""
        return threading.get_ident() == self._thread or is_in_backward()

    # -- told by the status ---------------------------------------------------------------------------

    def enter(self, phase: str, where: str) -> None:
        """Note the begin of a phase, as `RankStatus.enter` has it."""
        self._open(self._phase, f"{_PHASES[phase]}{' of ' if where else ''}{where}")

    def wait(self, wait: Wait | None) -> None:
        """Note the begin of a wait of the host, or its end."""
        self._open(self._waiting, None if wait is None else f"wait of {wait.label}")

    def _open(self, range_: ExitStack, text: str | None) -> None:
        """End a range, and begin the next one, if it has a name."""
        if self._is_here:
            range_.close()
            if text is not None:
                range_.enter_context(record_function(_PREFIX + text))


def _telling(recorder: _RangeRecorder) -> type[RankStatus]:
    """Return a class of statuses that tell a recorder of what is noted in them."""

    def enter(status: RankStatus, phase: str, where: str = "") -> None:
        RankStatus.enter(status, phase, where)
        recorder.enter(phase, where)

    def note(status: RankStatus, name: str, value: Any) -> None:
        is_new = name == "wait" and value is not status.wait
        object.__setattr__(status, name, value)
        if is_new:
            recorder.wait(value)

    return type("Telling", (RankStatus,), {"__slots__": (), "enter": enter, "__setattr__": note})
