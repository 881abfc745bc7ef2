"""The order in which units run: what is gathered ahead, what has had its backward, what is reduced next.

A rank learns it from its own forwards. Where ranks take different branches, they leave out different units,
and their orders differ. Reductions must start in one order on all ranks, or two of them would each wait for
what the other has not begun. So the ranks agree on one before the first reduction, and again after a rank has
met a new unit or another order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from zeroshard.comm.collectives import Axis
from zeroshard.sharding.unit import Unit

T = TypeVar("T", bound=Hashable)


def merge(orders: Iterable[Sequence[T]]) -> list[T]:
    """One order of all elements: each that is new goes right behind the one before it in its own order."""
    merged: list[T] = []
    for order in orders:
        place = 0
        for element in dict.fromkeys(order):
            if element in merged:
                place = merged.index(element) + 1
            else:
                merged.insert(place, element)
                place += 1
    return merged


class UnitOrder:
    """The units in the order of their forwards, without the root.

    Args:
        units: the root unit first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._by_name = {unit.name: unit for unit in units}
        self.units: list[Unit] = []
        self.has_changed = False
        """Whether this rank has met something new since the ranks last agreed."""
        self._agreed: list[Unit] = []

    def follow(self, called: Sequence[Unit], has_backward: bool) -> None:
        """Take in the units of a forward, in the order of their calls; without a backward, only new ones."""
        positions = [unit.position for unit in dict.fromkeys(called)]
        is_other = has_backward and any(a > b for a, b in pairwise(positions))
        if is_other or -1 in positions:
            self._set(merge([called, self.units] if is_other else [self.units, called]))
            self.has_changed = True

    def agree(self, axis: Axis) -> None:
        """Make one order of those of all ranks."""
        own = [unit.name for unit in self.units]
        everyone = axis.all_gather_object(own, "agreement on the order of units")
        self._agreed = [self._by_name[name] for name in merge(everyone)]
        self._set(list(self._agreed))
        self.has_changed = False

    def of_reductions(self) -> list[Unit]:
        """All units in the order in which they are reduced, the same on all ranks; the root comes last."""
        root, *others = self._by_name.values()
        agreed = set(self._agreed)
        unknown = [unit for unit in reversed(others) if unit not in agreed]
        return [*reversed(self._agreed), *unknown, root]

    def following(self, unit: Unit, num: int) -> list[Unit]:
        """The next ones in forward; of the root, the first. None where the unit is new."""
        is_known = unit.position >= 0 or unit is self._by_name[""]
        return self.units[unit.position + 1 : unit.position + 1 + num] if is_known else []

    def preceding(self, unit: Unit, num: int) -> list[Unit]:
        """The next ones in backward; of the root, the last. None where the unit is new."""
        end = len(self.units) if unit is self._by_name[""] else max(0, unit.position)
        return self.units[max(0, end - num) : end][::-1]

    def _set(self, units: list[Unit]) -> None:
        self.units = units
        for position, unit in enumerate(units):
            unit.position = position
