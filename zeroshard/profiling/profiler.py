"""Profiles the steps of an engine on this rank: torch's profiler with ranges of ours, and their table."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType, _profiler_enabled
from torch.profiler import record_function

from zeroshard.engine import Engine
from zeroshard.sharded import Sharded
from zeroshard.tables import LINE, render

COLUMNS = ("forward", "backward", "gather", "copy", "reduce", "free", "wait", "step", "other")
"""The kinds of ranges: compute of forwards and of backwards; gathers of parameters; copies of parameters from
another tier or dtype, where the host copies; packing, adding and delivery of gradients; freeing of
parameters; waits of the host for other ranks; the optimizer; and all outside."""
_PREFIX = "zeroshard: "
"""The beginning of the name of each range: "zeroshard: gather of unit 'blocks.0'"."""
_MOST_WAITS = 4
"""Waits that the text names."""
_UNDER_WAY = threading.Lock()


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

    def fill(self, *, on_device: bool) -> None:
        """Add up the ranges in `operations`.

        Args:
            on_device: True to add up the times of kernels, and not those of the host.
        """
        share = 1e-6 / max(1, self.num_steps)  # torch counts microseconds
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
        RuntimeError: another profile is under way.
    """
    if "schedule" in options:
        raise TypeError("zeroshard.profile() has no schedule: the block chooses the steps that are profiled")
    # torch would end that one, without an error; it knows of those of this thread.
    if _profiler_enabled() or not _UNDER_WAY.acquire(blocking=False):
        raise RuntimeError("another profile is under way in this process: end it before")
    try:
        result = Profile(operations=torch.profiler.profile(profile_memory=profile_memory, **options))

        def count() -> None:
            result.num_steps += 1

        result.operations.start()
        try:
            with engine.subscribe(lambda work: record_function(_PREFIX + work), count):
                yield result
        finally:
            result.operations.stop()
            result.fill(on_device=engine.device.type != "cpu")
    finally:
        _UNDER_WAY.release()
