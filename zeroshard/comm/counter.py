"""Bytes and calls of the collectives that algorithms asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroshard.tables import format_bytes, render

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "point_to_point", "control")
"""`point_to_point` is pipeline traffic; `control` are small agreements outside of the wire formula."""


@dataclass(frozen=True, kw_only=True)
class CommReport:
    """Traffic of this rank since the last reset, by collective, for any transport."""

    bytes_sent: Mapping[str, int]
    """Bytes that this rank sends to others, by collective."""
    calls: Mapping[str, int]
    """Number of collectives that were started, by collective."""

    def __str__(self) -> str:
        rows = [(kind, str(self.calls[kind]), format_bytes(self.bytes_sent[kind])) for kind in KINDS]
        return render("communication of this rank", ("collective", "calls", "sent"), rows)


@dataclass
class Counter:
    """Running sums behind a CommReport."""

    bytes_sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, kind: str, num_bytes: int) -> None:
        self.bytes_sent[kind] += num_bytes
        self.calls[kind] += 1

    def reset(self) -> None:
        self.bytes_sent = dict.fromkeys(KINDS, 0)
        self.calls = dict.fromkeys(KINDS, 0)

    def report(self) -> CommReport:
        return CommReport(bytes_sent=dict(self.bytes_sent), calls=dict(self.calls))
