"""One backward: a walk through the forwards before it, from their end to their beginning.

Every call of a unit begins and ends at a tick of the runtime's clock. Autograd runs nodes in the reverse
order of their creation. So when the gradient of an output arrives, the calls that began after that output was
made have had their backward.

    forward    0 root(   1 a(   2 )a   3 b(   4 c(   5 )c   6 )b   7 )root
    backward   enter root, enter b, enter c, leave c, leave b, enter a, leave a, leave root

To enter a unit is to gather its parameters, and the parameters of the next units ahead. To leave a unit is to
start the reduction of its gradients and to free it. A unit with several calls is entered at its last call and
left at its first.

[Note: One order of collectives] All ranks of a shard group make the same calls, as each call gathers. So they
have the same list of turns, whatever part of the graph the loss of a rank depends on. They take the turns in
the order of the list: a turn that nothing led to on this rank is taken when a later turn comes. Therefore
they issue the same gathers and reductions in the same order, on any number of communicators. The list covers
the forwards whose graphs are alive, and torch's own activation checkpoints; docs/architecture.md names the
programs outside.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple

from zeroshard.sharding.lease import Lease
from zeroshard.sharding.reducer import Reducer
from zeroshard.sharding.unit import ForwardCall, Region, Unit


class Turn(NamedTuple):
    """A tick of the walk, and the unit that is entered or left there."""

    tick: int
    unit: Unit
    enters: bool
    """True if the unit is entered; False if it is left."""


def plan_turns(units: Iterable[Unit]) -> list[Turn]:
    """List the turns of a backward through the calls that the units have noted, in the order of the walk.

    Units inside an activation checkpoint are entered together: its second forward needs all of them. A
    resident unit is only left.
    """
    turns = []
    for unit in units:
        if (visit := unit.visit) is not None:
            if not unit.is_resident:
                turns.append(((unit.entered, visit.ended), Turn(unit.entered, unit, enters=True)))
            turns.append(((visit.began, visit.began), Turn(visit.began, unit, enters=False)))
    turns.sort(key=lambda item: item[0], reverse=True)
    return [turn for _, turn in turns]


class Backward:
    """Take the turns of one backward as gradients arrive.

    Args:
        units: all units of the model; those with noted calls are walked through.
        reducer: starts the reduction of the gradients of units that are left.
        graph: the lease on units that stayed gathered for this backward.
        num_prefetch: the number of units whose gathers are started before they are entered.
        makes_graph: True for a backward with create_graph, whose graph another backward may go through.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        reducer: Reducer,
        graph: Lease[Unit],
        *,
        num_prefetch: int,
        makes_graph: bool,
    ) -> None:
        self.lease, self._graph, self.makes_graph = Lease[Unit]("backward"), graph, makes_graph
        self._turns = plan_turns(units)
        self._next = 0
        """The first turn that is still to be taken."""
        self._route = [turn.unit for turn in self._turns if turn.enters]
        self._num_entered = self._num_gathered = 0
        """The numbers of units of the route that were entered, and that gathers were started for."""
        self._reducer, self._num_prefetch = reducer, num_prefetch
        self._inside = {turn.unit for turn in self._turns if turn.unit.is_resident}
        self._repeated: set[Region] = set()
        """Checkpoints whose second forward has begun."""
        self._kept: list[Unit] = []
        """Units that were left; the second forward of a checkpoint may still call them."""
        self._now = self._turns[0].tick if self._turns else 0

    @property
    def left(self) -> list[Unit]:
        """The units of the walk in the order of their ends, which is the order of reductions."""
        return [turn.unit for turn in self._turns if not turn.enters]

    def enter(self, call: ForwardCall) -> None:
        """Take the turns up to the end of a call, since the gradient of one of its outputs has arrived."""
        self._take_until(call.ended)
        self._free_kept(call.ended)
        if call.unit not in self._inside:  # a call from before the last backward, or its graph comes again
            self._inside.add(call.unit)
            turn = Turn(call.began, call.unit, enters=False)
            insort(self._turns, turn, lo=self._next, key=lambda turn: -turn.tick)

    def note_gradient(self, unit: Unit) -> None:
        """Start the reductions that are due and complete, since a gradient of a parameter has arrived."""
        if unit.visit is not None and unit not in self._inside:  # its outputs could not be watched
            self._take_until(unit.visit.ended)
        if unit.is_complete:
            for turn in self._turns[self._next :]:
                if turn.enters or not self._reducer.start_complete(turn.unit):
                    break

    def enter_again(self, unit: Unit) -> None:
        """Take the turns up to the end of the last checkpoint around a unit that a second forward needs."""
        if unit.visit is not None and unit.visit.regions:
            self._take_until(unit.visit.regions[-1].ended)
            if len(unit.visit.regions) == 1:
                self._repeated.add(unit.visit.regions[0])
        elif unit in self._route[self._num_gathered :]:  # an unknown kind of checkpoint: nothing more is over
            self._gather(self._route.index(unit) + 1)

    def repeat(self, unit: Unit, tick: int) -> ForwardCall:
        """Make the call of a second forward; autograd treats it as the call that it repeats.

        Args:
            unit: the unit that is called again inside this backward.
            tick: the time now on the clock of forwards; for a unit without noted calls.
        """
        if unit.visit is None:
            return ForwardCall(unit, tick)
        call = ForwardCall(unit, unit.visit.began)
        call.ended = min(self._now, unit.visit.ended)
        return call

    def finish(self) -> None:
        """Take the turns that are left: the backward is over, or has failed."""
        self._take_until(0)
        self._free_kept(0)

    def _take_until(self, tick: int) -> None:
        while self._next < len(self._turns) and self._turns[self._next].tick >= tick:
            turn = self._turns[self._next]
            self._next += 1
            (self._enter if turn.enters else self._leave)(turn.unit)
        self._now = min(self._now, tick)

    def _enter(self, unit: Unit) -> None:
        self._inside.add(unit)
        self._num_entered += 1
        self._gather(self._num_entered + self._num_prefetch)

    def _leave(self, unit: Unit) -> None:
        self._inside.discard(unit)
        self._reducer.start(unit)
        if unit.visit is not None and unit.visit.regions:
            self._kept.append(unit)
        else:
            self._free(unit)

    def _free_kept(self, tick: int) -> None:
        """Free units whose checkpoints have run their second forward to the end, or will not run it here.

        Args:
            tick: the present tick of the walk; a gradient has arrived there.
        """
        if not self._kept:
            return

        def is_over(region: Region) -> bool:
            return region in self._repeated or region.began > tick

        kept, self._kept = self._kept, []
        for unit in kept:
            assert unit.visit is not None, "it was kept for the checkpoints around its calls"
            if all(is_over(region) for region in unit.visit.regions):
                self._free(unit)
            else:
                self._kept.append(unit)

    def _free(self, unit: Unit) -> None:
        unit.slots.uninstall()
        self.lease.end((unit,))
        self._graph.end((unit,))
        if not unit.leases:
            unit.reshard()

    def _gather(self, num: int) -> None:
        """Start the gathers of the first `num` units of the route."""
        for unit in self._route[self._num_gathered : num]:
            if unit.joins_backward:  # also without a backward on this rank: others may have one
                unit.unshard()
                self.lease.take(unit)
        self._num_gathered = max(self._num_gathered, num)
        for unit in self._route[num : num + 1]:
            unit.read_ahead()
