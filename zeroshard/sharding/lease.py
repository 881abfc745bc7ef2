"""Leases: reasons to keep units gathered. A unit is freed when the last lease on it ends.

lease          taken                                    ended
in use         before a forward of the unit             after it
trailing       after a forward of the unit              when another unit begins
staying        after a forward, where units are kept    when the root's forward ends
ahead          by a prefetch in forward                 when the unit begins, or with the forward
graph          when the root's forward ends: on the     by the backward, the unit's next forward, or
               root, and on units that trail or stay    the end of the root's
backward       when a backward gathers the unit         when the backward leaves the unit
second graph   by a backward that makes a graph         by the step
held           by `generate` and its like               by them
scheduled      by an unshard of a schedule              by its reshard
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar


class Leased(Protocol):
    """A unit as a lease sees it."""

    leases: set[Any]
    """The leases on the unit that have not ended."""


T = TypeVar("T", bound=Leased)


class Lease(Generic[T]):
    """One reason to keep units gathered.

    Args:
        why: the name of the reason, for people who debug.
    """

    __slots__ = ("units", "why")

    def __init__(self, why: str) -> None:
        self.why = why
        self.units: dict[T, None] = {}
        """The units that it keeps, in the order in which it took them."""

    def __repr__(self) -> str:
        return f"Lease({self.why}, {len(self.units)} units)"

    def take(self, *units: T) -> None:
        """Keep units gathered from now on. The caller gathers them."""
        for unit in units:
            self.units[unit] = None
            unit.leases.add(self)

    def end(self, units: Iterable[T] | None = None) -> None:
        """Keep units no longer; None: all of them. The caller frees those without another lease."""
        for unit in tuple(self.units if units is None else units):
            if unit in self.units:
                del self.units[unit]
                unit.leases.discard(self)


class Leases(Generic[T]):
    """The leases of a runtime, one of each kind; the lease of a backward belongs to the backward."""

    def __init__(self) -> None:
        self.in_use, self.ahead, self.trailing = Lease[T]("in use"), Lease[T]("ahead"), Lease[T]("trailing")
        self.staying, self.graph = Lease[T]("staying"), Lease[T]("graph")
        self.second_graph, self.held = Lease[T]("second graph"), Lease[T]("held")
        self.scheduled = Lease[T]("scheduled")

    def end_forward(self) -> None:
        """End the leases of a forward that is over or has failed."""
        for lease in (self.in_use, self.ahead, self.trailing, self.staying):
            lease.end()
