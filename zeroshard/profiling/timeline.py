"""A timeline: the time of a rank, divided into spans that leave no gap and do not overlap.

At any time the rank is in one phase (the forward of a unit, the optimizer step, ...), and perhaps in some
task inside it (a gather, a wait, ...), which may hold others. Time belongs to the innermost one. So the spans
of a step add up to its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


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
    """The phase around it."""
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
        self._now, self._phase, self._tasks = now, OTHER, list[Label]()
        self.moments: list[Any] = [now()]
        """The borders of the spans."""
        self._labels: list[tuple[Label, Label]] = []
        self.ends: list[int] = []
        """The indices of the moments at which steps ended."""

    @property
    def phase(self) -> Label:
        """The phase under way."""
        return self._phase

    def enter(self, phase: Label) -> None:
        """Begin a phase, which ends the one before; tasks go on."""
        self._cut()
        self._phase = phase

    def end_step(self) -> None:
        """Note that a step ends now; the phase under way goes on."""
        self._cut()
        self.ends.append(len(self.moments) - 1)

    def begin(self, task: Label) -> None:
        """Begin a task inside of what is under way."""
        self._cut()
        self._tasks.append(task)

    def end(self) -> None:
        """End the innermost task."""
        self._cut()
        self._tasks.pop()

    def close(self) -> None:
        """End the last span."""
        self._cut()

    def _cut(self) -> None:
        self._labels.append((self._phase, self._tasks[-1] if self._tasks else self._phase))
        self.moments.append(self._now())

    def spans(self, seconds: Sequence[float], first: int = 0) -> list[TimeSpan]:
        """Return the spans in order, those of no length left out.

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
