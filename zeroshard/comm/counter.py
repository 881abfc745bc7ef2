"""Calls, bytes and waits of the collectives that algorithms asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroshard.tables import LINE, format_bytes, render

CONTROL, ALL_REDUCE, ALL_TO_ALL = "control", "all_reduce", "all_to_all"
KINDS = ("all_gather", "reduce_scatter", ALL_REDUCE, ALL_TO_ALL, "point_to_point", CONTROL)
"""`all_to_all` is the traffic of optimizers that compute with whole tensors, `point_to_point` the
traffic of pipelines; `control` are small agreements outside of the wire formula."""


@dataclass(frozen=True)
class CommReport:
    """Traffic of this rank since the last reset, by collective, for any transport."""

    bytes_sent: Mapping[str, int]
    """Bytes that this rank sends to others, by collective."""
    calls: Mapping[str, int]
    """Number of collectives that were started, by collective."""
    waited_s: Mapping[str, float]
    """Seconds that the host stood still until a collective was over, by collective.

    Waiting for a slower rank is part of it; transfers while this rank computes are not. An accelerator waits
    by itself for "all_gather" and "reduce_scatter", which then have 0 here: the host goes on.
    """
    elapsed_s: float
    """Seconds since the last reset."""
    rank: int
    """This rank among the data-parallel ranks."""
    num_ranks: int

    def __str__(self) -> str:
        def row(name: str, calls: int, sent: int, waited_s: float) -> tuple[str, ...]:
            return name, str(calls), format_bytes(sent), f"{waited_s:.3f} s" if waited_s else "-"

        calls, sent, waited = self.calls, self.bytes_sent, self.waited_s
        rows = [row(kind, calls[kind], sent[kind], waited[kind]) for kind in KINDS if calls[kind]]
        total = row("total", sum(calls.values()), sum(sent.values()), sum(waited.values()))
        title = f"communication of rank {self.rank} of {self.num_ranks} in {self.elapsed_s:.3f} s"
        table = render(title, ("collective", "calls", "sent", "host waited"), [*rows, LINE, total])
        return (
            f"{table}\nhost waited: time in which the host stood still until a collective was over;\n"
            "-: not at all, as for gathers and reductions where the device waits by itself"
        )


@dataclass
class Counter:
    """Running sums that a CommReport is made from."""

    bytes_sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    waited_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    since: float = field(default_factory=time.monotonic)

    def add(self, kind: str, num_bytes: int) -> None:
        self.bytes_sent[kind] += num_bytes
        self.calls[kind] += 1

    def reset(self) -> None:
        vars(self).update(vars(Counter()))

    def report(self, *, rank: int = 0, num_ranks: int = 1) -> CommReport:
        """Return the sums so far, for a report that names one rank of so many."""
        elapsed_s = time.monotonic() - self.since
        sums = dict(self.bytes_sent), dict(self.calls), dict(self.waited_s)
        return CommReport(*sums, elapsed_s, rank, num_ranks)
