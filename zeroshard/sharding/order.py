"""The order in which units run: the units that are gathered ahead in forward, and the order of reductions.

A rank learns the order from its own forwards. Reductions must start in one order on all ranks, or two ranks
would each wait for a reduction that the other has not begun. If parameters are gathered in a forward, all
ranks make the same calls and know the order in which a backward leaves units. At other stages ranks may take
different branches and leave out different units. They agree on one order before the first reduction, and
again after a rank has met a new unit or another order.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import islice, pairwise
from typing import TypeVar

from zeroshard.comm.collectives import Axis
from zeroshard.sharding.unit import Unit

T = TypeVar("T", bound=Hashable)


def merge(orders: Iterable[Sequence[T]]) -> list[T]:
    """Make one order of all elements: a new element goes right after its predecessor in its own order."""
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
        units: the root unit first, then those that are gathered or reduced.
        is_common: True if all ranks make the same calls; then they need no agreement.
    """

    def __init__(self, units: Sequence[Unit], *, is_common: bool) -> None:
        self._is_common = is_common
        self._by_name = {unit.name: unit for unit in units}
        self.units: list[Unit] = []
        self.has_changed = False
        """True if this rank has met a new unit or another order since the ranks last agreed."""
        self.scope: Collection[Unit] | None = None
        """The units that may be gathered ahead; None: all."""
        self.reductions: list[Unit] = []
        """All units in the order in which they are reduced, the same on all ranks; the root comes last."""
        self._reduce([])

    def follow(self, called: Sequence[Unit], has_backward: bool) -> None:
        """Take in the units of a forward, in the order of their calls; without a backward, only new ones."""
        positions = [unit.position for unit in dict.fromkeys(called)]
        is_other = has_backward and any(a > b for a, b in pairwise(positions))
        if is_other or -1 in positions:
            self._set(merge([called, self.units] if is_other else [self.units, called]))
            self.has_changed = not self._is_common

    def follow_backward(self, units: Sequence[Unit]) -> None:
        """Take in the order in which a new backward leaves units."""
        if self._is_common:
            self._reduce([unit for unit in units if unit is not self._by_name[""]])

    def agree(self, axis: Axis) -> None:
        """Make one order of the orders of all ranks; collective."""
        if self._is_common:
            return
        own = [unit.name for unit in self.units]
        everyone = axis.all_gather_object(own, "agreement on the order of units")
        merged = [self._by_name[name] for name in merge(everyone)]
        self._reduce(merged[::-1])
        self._set(merged)
        self.has_changed = False

    def following(self, unit: Unit, num: int) -> list[Unit]:
        """The next units in forward that are gathered; of the root, the first ones. A new unit has none."""
        is_known = unit.position >= 0 or unit is self._by_name[""]
        later, scope = self.units[unit.position + 1 :] if is_known else [], self.scope
        return list(islice((u for u in later if not u.is_resident and (scope is None or u in scope)), num))

    def _reduce(self, first: list[Unit]) -> None:
        """Reduce these units first from now on: the order is agreed on, or follows from the last backward."""
        root, *others = self._by_name.values()
        known = set(first)
        self.reductions = [*first, *(unit for unit in reversed(others) if unit not in known), root]

    def _set(self, units: list[Unit]) -> None:
        self.units = units
        for position, unit in enumerate(units):
            unit.position = position
