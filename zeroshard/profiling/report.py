"""The results of a profile, as numbers and as one table.

A timeline: the time of a rank, divided into spans that leave no gap and do not overlap.

At any time the rank is in one phase (the forward of a unit, the optimizer step, ...), and perhaps in some
task inside it (a gather, a wait, ...), which may hold others. Time belongs to the innermost one. So the spans
of a step add up to its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroshard.memory.report import MemoryReport
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import UnitState
from zeroshard.tables import LINE, format_bytes, render


class Label(NamedTuple):
    """The name of what a rank does."""

    kind: str
    """One of `zeroshard.profiling.report.COLUMNS`; "other" outside of all."""
    name: str = ""
    """The unit, or the collective that a wait is for."""


OTHER = Label("other")
"""Outside of forward, backward and step: the loss, batches, the code of the user."""


class TimeSpan(NamedTuple):
    """A part of the time that belongs to one label."""

    phase: Label
    label: Label
    """The phase itself, or the innermost task in it."""
    start: float
    """Seconds from the beginning of the timeline."""
    stop: float

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return self.stop - self.start


class PhaseTimeline:
    """Notes the moments at which a rank begins and ends to do something.

    Args:
        now: returns a moment, of any type.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now, self._tasks = now, list[Label]()
        self.phase = OTHER
        """The phase under way."""
        self.moments: list[Any] = [now()]
        """The borders of the spans."""
        self._labels: list[tuple[Label, Label]] = []
        self.ends: list[int] = []
        """The indices of the moments at which steps ended."""

    def enter(self, phase: Label) -> None:
        """Begin a phase, which ends the one before; tasks go on."""
        self.cut()
        self.phase = phase

    def end_step(self) -> None:
        """Note that a step ends now; the phase under way goes on."""
        self.cut()
        self.ends.append(len(self.moments) - 1)

    def begin(self, task: Label) -> None:
        """Begin a task inside of what is under way."""
        self.cut()
        self._tasks.append(task)

    def end(self) -> None:
        """End the innermost task."""
        self.cut()
        self._tasks.pop()

    def cut(self) -> None:
        """End the span under way, and begin another span."""
        self._labels.append((self.phase, self._tasks[-1] if self._tasks else self.phase))
        self.moments.append(self._now())

    def spans(self, seconds: Sequence[float], first: int = 0) -> list[TimeSpan]:
        """Return the spans in order; spans of no length are left out.

        Args:
            seconds: the time of each of the `moments`.
            first: the index of the moment to begin at.
        """
        pairs = zip(self._labels[first:], seconds[first:], seconds[first + 1 :], strict=False)
        return [TimeSpan(*labels, start, stop) for labels, start, stop in pairs if stop > start]


def add_up(spans: Iterable[TimeSpan], key: Callable[[TimeSpan], Any]) -> dict[Any, float]:
    """Return the seconds of spans by a key, in the order in which keys come first."""
    total: defaultdict[Any, float] = defaultdict(float)
    for span in spans:
        total[key(span)] += span.seconds
    return dict(total)


KINDS = ("states", "unsharded", "packed", "other")
"""The kinds of memory, as `MemorySample` has them."""


class MemorySample(NamedTuple):
    """Bytes of a rank at the begin of a phase."""

    seconds: float
    """Since the begin of the profile, on the clock of the host."""
    phase: Label
    states: int
    """Parameters, scales, optimizer states and averages at rest: at the begin, and from the first step on."""
    unsharded: int
    packed: int
    """Buffers in which gradients are packed for a reduction."""
    other: int
    """The rest: activations, gradients, and all that the rest of the program holds."""
    units: tuple[str, ...] = ()
    """The gathered units, of a sample with more bytes than all before it."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())

    @property
    def kinds(self) -> Mapping[str, int]:
        """Bytes by kind."""
        return {kind: getattr(self, kind) for kind in KINDS}

    def __str__(self) -> str:
        """Name the phase and the gathered units."""
        names = list(self.units[:_MOST_NAMES])
        if more := len(self.units) - len(names):
            names.append(f"{more} more")
        return f"{describe(self.phase)}{'; gathered: ' if names else ''}{', '.join(names)}"


class MemoryWatch:
    """Takes samples.

    On an accelerator they add up to what torch has allocated there; on the CPU to the resident memory of the
    process. So there `other` also has Python, the libraries, and freed memory that the process keeps.

    Args:
        runtime: the runtime of the engine.
        at_rest: the memory at the begin.
        count: counts the bytes of this process on its device.
    """

    def __init__(self, runtime: Runtime, at_rest: MemoryReport, count: Callable[[], int]) -> None:
        self._runtime, self._count = runtime, count
        self.note_states(at_rest)
        self.samples: list[MemorySample] = []
        self._most = 0

    def note_states(self, at_rest: MemoryReport) -> None:
        """Take over the memory at rest, which the first step of an optimizer adds its states to."""
        self._states = at_rest.total - at_rest.gradients - at_rest.unsharded

    def take(self, seconds: float, phase: Label) -> None:
        """Take a sample at the begin of a phase."""
        unsharded, packed = self._runtime.context.meter.now, self._runtime.reducer.pool.num_bytes
        other = self._count() - self._states - unsharded - packed
        sample = MemorySample(seconds, phase, self._states, unsharded, packed, max(0, other))
        if sample.total > self._most:
            self._most, units = sample.total, self._runtime.units
            gathered = (u.described for u in units if u.state is not UnitState.SHARDED and not u.is_resident)
            sample = sample._replace(units=tuple(gathered))
        self.samples.append(sample)


COLUMNS = ("forward", "backward", "gather", "copy", "reduce", "free", "wait", "step", "other")
"""The kinds of time: compute of forwards and of backwards, without the tasks inside; gathers of parameters,
as far as they keep the host or the stream of compute busy; copies of parameters from another tier or dtype,
where the host copies; packing, adding and delivery of gradients; freeing of parameters; waits for other
ranks, which is the exposed communication; the optimizer; and all outside."""
_MOST_NAMES = 4
"""Gathered units that the peak names, and waits that the text names."""


@dataclass
class Profile:
    """The time and the memory of steps on this rank, by phase and by unit; filled when the profile ends.

    All times are in seconds, all memory in bytes. `str(profile)` has a table.
    """

    num_steps: int = 0
    """Optimizer steps that ended inside."""
    seconds: float = 0.0
    """The whole time of the profile."""
    spans: Sequence[TimeSpan] = ()
    """The parts of that time; without gaps, so they add up to it."""
    samples: Sequence[MemorySample] = ()
    """The memory at the begin of each phase; () if it was not asked for."""
    flops: int | None = None
    """Floating-point operations of this rank that ran in a step, counted in the first one; None if they were
    not asked for, or no step ended."""
    model_flops: int | None = None
    """The model's operations among them: without recomputed ones, and without the optimizer's."""
    peak_flops: float | None = None
    """Floating-point operations per second that the device could do."""
    operations: Any = None
    """torch's own profile, of `torch.profiler`, if it was asked for."""

    def fill(self, timeline: PhaseTimeline, seconds: Sequence[float], first: int) -> None:
        """Take over a timeline that has ended.

        Args:
            timeline: the timeline.
            seconds: the time of each of its moments.
            first: the index of the moment to begin at: 0, or the end of a step that does not count.
        """
        self.num_steps = sum(end > first for end in timeline.ends)
        self.seconds = seconds[-1] - seconds[first]
        self.spans = timeline.spans(seconds, first)

    @property
    def peak(self) -> MemorySample | None:
        """The first sample with the most bytes; None without samples."""
        return max(self.samples, key=lambda sample: sample.total, default=None)

    @property
    def seconds_per_step(self) -> float:
        """The mean time of a step.

        Raises:
            RuntimeError: no step ended inside the profile.
        """
        if not self.num_steps:
            more = ", and a second one with flops=True" if self.flops is not None else ""
            raise RuntimeError(f"the profile has no step: expected an optimizer step inside the block{more}")
        return self.seconds / self.num_steps

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds of a step by kind, see `COLUMNS`; they add up to `seconds_per_step`."""
        found = self._add_up(self.spans, lambda span: span.label.kind)
        return {kind: found.get(kind, 0.0) for kind in COLUMNS}

    @property
    def units(self) -> Mapping[str, Mapping[str, float]]:
        """Seconds of a step by unit and kind; a wait belongs to the unit of the phase around it."""
        found = self._add_up(self.spans, lambda span: (_unit_of(span), span.label.kind))
        units: dict[str, dict[str, float]] = {}
        for (unit, kind), seconds in found.items():
            units.setdefault(unit, dict.fromkeys(COLUMNS, 0.0))[kind] += seconds
        return units

    @property
    def waits(self) -> Mapping[str, float]:
        """Seconds of a step by the collective that the rank waited for, the longest first."""
        waits = (span for span in self.spans if span.label.kind == "wait")
        found = self._add_up(waits, lambda span: span.label.name)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def utilization(self) -> float | None:
        """The share of `peak_flops` that the model reaches (MFU: Chowdhery et al. 2022, appendix B)."""
        return self._share_of_peak(self.model_flops)

    @property
    def hardware_utilization(self) -> float | None:
        """The share of `peak_flops` that all that runs reaches (HFU: Chowdhery et al. 2022, appendix B)."""
        return self._share_of_peak(self.flops)

    def _share_of_peak(self, flops: int | None) -> float | None:
        if flops is None or self.peak_flops is None or not self.num_steps:
            return None
        return flops / self.seconds_per_step / self.peak_flops

    def _add_up(self, spans: Iterable[TimeSpan], key: Callable[[TimeSpan], Any]) -> dict[Any, float]:
        return {name: seconds / self._steps for name, seconds in add_up(spans, key).items()}

    @property
    def _steps(self) -> int:
        return max(1, self.num_steps)

    def __str__(self) -> str:
        phases, units = self.phases, self.units
        used = [kind for kind in COLUMNS if phases[kind]]
        rows: list[tuple[str, ...]] = [
            (unit, *(_ms(times[kind]) for kind in used), _ms(sum(times.values())))
            for unit, times in units.items()
        ]
        total = self.seconds / self._steps
        rows += [LINE, ("all", *(_ms(phases[kind]) for kind in used), _ms(total))]
        rows.append(("share", *(f"{phases[kind] / total:.1%}" for kind in used), "100.0%"))
        title = f"a step by unit, mean of {self.num_steps}, ms"
        return "\n".join([render(title, ("unit", *used, "all"), rows, 120), *self._lines()])

    def _lines(self) -> Iterator[str]:
        """Yield a line for each of the longest waits, the counts of operations, and the peak of memory."""
        for name, seconds in list(self.waits.items())[:_MOST_NAMES]:
            yield f"wait for {name}: {_ms(seconds)} ms"
        for name, flops in {"": self.model_flops, ", all that ran": self.flops}.items():
            if flops is not None and (not name or flops != self.model_flops):
                share = self._share_of_peak(flops)
                # The first step alone is counted, and not timed.
                rate = (
                    f"{flops / self.seconds_per_step / 1e12:.3g} TFLOP/s" if self.num_steps else "not timed"
                )
                of_peak = "" if share is None else f", {share:.1%} of the peak"
                yield f"{flops / 1e12:.3g} TFLOP{name}: {rate}{of_peak}"
        if self.peak is not None:
            kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in self.peak.kinds.items())
            yield f"memory at the peak {format_bytes(self.peak.total)} ({kinds}), {self.peak}"


def describe(phase: Label) -> str:
    """A phase as a person would name it."""
    if phase == OTHER:
        return "outside of forward, backward and step"
    return f"{phase.kind} of {phase.name}" if phase.name else phase.kind


def _unit_of(span: TimeSpan) -> str:
    return (span.phase if span.label.kind == "wait" else span.label).name or "no unit"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds else ""
