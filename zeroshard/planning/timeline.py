"""A configuration, what it costs, and the time line of its step: a list schedule over units.

    compute    | F1 | F2 | F3 | B3 | B2 | B1 | step      one resource does one thing after another
    network    | G1 G2 G3        G2 R3 G1 R2   R1         G gather, R reduction
    link                         S3   S2   S1             states to the device and back

An action begins when its resource is free and what it needs is there: a forward needs its gather, which is
issued when the unit before begins; a reduction follows its backward; states travel after the reduction. On
ranks that share their cores with exchanges, the network is the compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroshard.forwards.keeping import Interval
from zeroshard.parallel.pipeline.actions import loop

COMPUTE, NETWORK, LINK = "compute", "network", "link"
"""The resources of a rank."""
TIERS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme"))
"""Tiers of optimizer states and of parameters, the nearest first; stage 3 has more than the first two."""
RECOMPUTES = ("none", "unit", "auto")
"""Ways to recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A point of the space that is searched."""

    stage: int = 3
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    """Chunks on each pipeline rank."""
    tiers: tuple[str, str] = ("none", "none")
    """Of optimizer states, and of parameters."""
    recompute: str = "none"
    samples: int = 1
    """Of a micro-batch."""
    bits: int = 32
    """Of each state of the optimizer."""

    @property
    def placement(self) -> Sequence[int]:
        """The pipeline rank of each chunk."""
        down = range(self.pp)
        return (*down, *reversed(down)) if self.schedule == "zbv" else loop(self.pp, self.chunks)

    def __str__(self) -> str:
        values = {"stage": self.stage, "micro-batch": self.samples, "tp": self.tp, "pp": self.pp}
        parts = [f"{name} {value}" for name, value in values.items() if value > 1 or name not in ("tp", "pp")]
        parts += [self.schedule, f"{self.chunks} chunks"][: 1 + (self.chunks > 1)] if self.pp > 1 else []
        parts += [] if self.recompute == "none" else [f"recompute {self.recompute}"]
        parts += [] if self.tiers == TIERS[0] else [f"offload {'/'.join(self.tiers)}"]
        return ", ".join([*parts, *(["8-bit states"] if self.bits == 8 else [])])


def recomputes(choice: Choice) -> Sequence[str]:
    """Return the ways to recompute that exist: a pipeline has no budget of memory."""
    return RECOMPUTES if choice.pp == 1 else RECOMPUTES[:2]


class Prediction(NamedTuple):
    """A step of a configuration.

    - busy: the seconds in which each resource is busy, on the rank that takes longest.
    - spans: the time line of each resource, or of each pipeline rank.
    - bubble: the share of the time in which pipeline ranks wait.
    - estimate: the bytes of a rank, an `Estimate`; None from `Predictor.step`.
    """

    choice: Choice
    seconds: float
    busy: dict[str, float]
    spans: Callable[[], Iterator[Interval]]
    bubble: float = 0.0
    estimate: Any = None

    @property
    def bound(self) -> str:
        """The resource that is busy longest."""
        return max(self.busy, key=self.busy.__getitem__)


class Costs(NamedTuple):
    """What rows of a profile cost a rank, [rows], or their sums.

    - forward, backward: seconds; plans alone have those of the casts of gradients.
    - first, gather, regather: seconds of gathers for the first forward of a step, for others, for backwards.
    - reduce: seconds of the exchange of gradients.
    - link, relink: seconds in which parameters come to the device for a forward and a backward.
    - states: seconds of states and main parameters on their way to the device and back, once a step.
    """

    forward: Any
    backward: Any
    first: Any
    gather: Any
    regather: Any
    reduce: Any
    link: Any
    relink: Any
    states: Any
    step: Any


class Line:
    """The time line of a rank."""

    def __init__(self, shares_cores: bool) -> None:
        self._network = COMPUTE if shares_cores else NETWORK
        self.ends = dict.fromkeys((COMPUTE, NETWORK, LINK), 0.0)
        self.busy = dict(self.ends)
        self.spans: list[Interval] = []

    @property
    def end(self) -> float:
        """The time at which all is done."""
        return max(self.ends.values())

    def add(self, row: str, label: str, ready: float, seconds: float) -> float:
        """Do something as soon as its resource is free, not before `ready`; return its end."""
        if not seconds:
            return ready
        row = self._network if row == NETWORK else row
        start = max(self.ends[row], ready)
        self.ends[row] = start + seconds
        self.busy[row] += seconds
        self.spans.append(Interval(row, label, start, self.ends[row]))
        return self.ends[row]

    def run(self, kind: str, order: Sequence[int], *times: Sequence[float]) -> float:
        """Add a forward or a backward; return the time at which its last gradient is reduced.

        Args:
            kind: the letter of the computation, F or B.
            order: the rows of the profile.
            times: the seconds of the computation of each row, of its way over the link, of its gather, and of
                the reduction of its gradient.
        """
        seconds, link, gather, reduce = times

        def prepare(row: int, ready: float) -> float:
            return self.add(NETWORK, "G", self.add(LINK, "L", ready, link[row]), gather[row])

        ready = end = prepare(order[0], self.ends[COMPUTE])
        for row, following in zip(order, (*order[1:], -1), strict=True):
            start = max(ready, self.ends[COMPUTE])  # the next gather is issued as this row begins
            end = self.add(COMPUTE, kind, ready, seconds[row])
            ready = prepare(following, start) if following >= 0 else ready
            end = self.add(NETWORK, "R", end, reduce[row])
        return end

    def step(self, own: Costs, order: Sequence[int], ready: float) -> None:
        """Add the step of some rows."""
        for row in reversed(order):
            self.add(COMPUTE, "s", self.add(LINK, "S", ready, own.states[row]), own.step[row])
