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

from zeroshard.sharding.unit import Unit


class Lease:
    """One reason to keep units gathered."""

    def __init__(self) -> None:
        self.units: dict[Unit, None] = {}
        """The units that it keeps, in the order in which it took them."""

    def take(self, *units: Unit) -> None:
        """Keep units gathered from now on. The caller gathers them."""
        for unit in units:
            self.units[unit] = None
            unit.leases.add(self)

    def end(self, units: Iterable[Unit] | None = None) -> None:
        """Keep units no longer; None: all of them. The caller frees those without another lease."""
        for unit in tuple(self.units if units is None else units):
            if unit in self.units:
                del self.units[unit]
                unit.leases.discard(self)


class Leases:
    """The leases of a runtime, one of each kind; the lease of a backward belongs to the backward."""

    def __init__(self) -> None:
        self.in_use, self.ahead, self.trailing, self.staying = Lease(), Lease(), Lease(), Lease()
        self.graph, self.second_graph, self.held, self.scheduled = Lease(), Lease(), Lease(), Lease()

    def end_forward(self) -> None:
        """End the leases of a forward that is over or has failed."""
        for lease in (self.in_use, self.ahead, self.trailing, self.staying):
            lease.end()
