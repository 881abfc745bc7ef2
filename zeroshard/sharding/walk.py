"""The calls of units in forwards, the walk of a backward through them, from end to beginning, and leases.

Every call of a unit begins and ends at a tick of the runtime's clock. Autograd runs nodes in the reverse
order of their creation. So when the gradient of an output arrives, the calls that began after that output was
made have had their backward.

    forward    0 root(   1 a(   2 )a   3 b(   4 c(   5 )c   6 )b   7 )root
    backward   enter root, enter b, enter c, leave c, leave b, enter a, leave a, leave root

To enter a unit is to gather its parameters, and the parameters of the next units ahead. To leave a unit is to
start the reduction of its gradients and to free it. A unit with several calls is entered at its last call and
left at its first. Units inside one activation checkpoint are entered together, and freed together.

[Note: One order of collectives] All ranks of a shard group make the same calls, as each call gathers. So they
have the same list of turns, whatever part of the graph the loss of a rank depends on. They take the turns in
the order of the list: a turn that nothing led to on this rank is taken when a later turn comes. Therefore
they issue the same gathers and reductions in the same order, on any number of communicators. The list covers
the forwards whose graphs are alive, and torch's own activation checkpoints; docs/architecture.md names the
programs outside.

[Note: Leases] A lease is a reason to keep units gathered. The end of the last lease on a unit frees it.

lease          taken                                    ended
forward        before a forward of the unit, or by a    when another unit begins after it, or, where
               prefetch                                 units are kept, when the root's forward ends
graph          when the root's forward ends: on the     when the backward leaves the unit, by the
               root, and on units that it has kept;     unit's next forward, or the end of the root's
               and when a backward gathers the unit
second graph   by a backward that makes a graph         by the step
scheduled      by an unshard of a schedule, and by      by its reshard, and by them
               `generate` and its like
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable, Sequence
from itertools import count, islice
from operator import attrgetter, itemgetter
from types import FrameType
from typing import NamedTuple
from weakref import ref

import torch

from zeroshard.internals.autograd import outermost_checkpoint
from zeroshard.sharding.reducer import Reducer
from zeroshard.sharding.unit import NEVER, ForwardCall, Unit, Visit


class _Forward(dict[Unit, Visit]):
    """The calls of one forward, held by the calls that a graph holds, and by the last call of each unit."""


class CallLog:
    """Notes the calls of forwards, and puts into `Unit.visit` those that a backward may come to.

    Args:
        units: the root unit first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units, self._root = frozenset(units), units[0]
        self.tick = count(1).__next__
        """The clock: it goes on at each beginning and end of a call."""
        self._num_past = 0
        """The first of `_forwards`, through which a backward has gone: their graphs do not come again."""
        self._now: _Forward | None = None
        """The forward under way, if it may have a backward; the same on all ranks."""
        self._forwards: list[ref[_Forward]] = []
        """The forwards since the last backward; a dead one has no graph any more."""
        self._num_open = 0
        """Calls that are under way."""
        self._root_caller: FrameType | None = None
        """The frame that called the root, while the root runs."""
        self._regions: dict[FrameType, Visit] = {}
        """The activation checkpoints of the forward under way."""
        self.name: Hashable = None
        """The name of forwards that begin, and of those that a backward comes to; None for no name."""
        self.named: dict[Hashable, _Forward] = {}
        """The forwards with names that a backward may still come to."""

    def begin(self, unit: Unit, caller: FrameType) -> None:
        """Note the begin of a unit's forward, outside of any backward. Other units get a call, too.

        Args:
            unit: the unit; its `call` is the new call until that ends.
            caller: a frame that runs as long as the call does.
        """
        call = ForwardCall(unit, self.tick())
        if unit.call.ended == NEVER and unit.call.began != NEVER:
            call.outer = unit.call
        unit.call = call
        if unit not in self._units:
            return
        del self._forwards[: self._num_past]
        self._num_past = 0
        if not self._num_open:  # the outermost: parts of it may be under no_grad on some ranks
            self._now = _Forward() if torch.is_grad_enabled() else None
            self._forwards = [forward for forward in self._forwards if forward() is not None]
            if self._now is not None and self.name is not None:
                self.named[self.name] = self._now
            elif self._now is not None:
                self._forwards.append(ref(self._now))
        self._num_open += 1
        if self._now is not None:
            call.forward = self._now
            if (visit := self._now.get(unit)) is None:
                visit = self._now[unit] = Visit(call.began)
            call.region = None if unit.is_resident else self._find_region(unit, caller)
            if call.region is not None and call.region not in visit.regions:
                visit.regions = (*visit.regions, call.region)

    def end(self, unit: Unit) -> None:
        """Note the end of a unit's call, perhaps by an exception."""
        call = unit.call
        # A hook before ours may have failed. A second forward has a call that has ended.
        if call.ended == NEVER and call.began != NEVER:
            call.ended = self.tick()
            if unit in self._units:
                if self._now is not None and unit in self._now:
                    self._now[unit].ended = call.ended
                if call.region is not None:
                    call.region.ended = call.ended
                self._num_open -= 1
                if not self._num_open:
                    self._drop_frames()
        if call.outer is not None:
            unit.call = call.outer

    def collect(self) -> None:
        """Begin a backward: give each unit its calls in all forwards that the backward may come to."""
        for unit in self._units:
            unit.visit = None
        unnamed = [reference() for reference in self._forwards]
        for forward in unnamed if self.name is None else [self.named.get(self.name)]:
            if forward is not None:
                for unit, visit in forward.items():
                    unit.visit = visit if unit.visit is None else unit.visit.and_then(visit)

    def drop_failed(self) -> None:
        """Drop the root's forward, which has ended in an exception and will have no backward."""
        self._forwards = [forward for forward in self._forwards if forward() is not self._now]
        self._now = None
        self._num_open = 0
        self._drop_frames()

    def end_backward(self) -> None:
        """Note that the calls so far have had their backward: the next call forgets them."""
        self._num_past = len(self._forwards)

    def _find_region(self, unit: Unit, caller: FrameType) -> Visit | None:
        checkpoint = outermost_checkpoint(caller, self._root_caller)
        is_in_root = self._root_caller is not None
        if unit is self._root:
            self._root_caller = caller
        if checkpoint is not None:
            return self._regions.setdefault(checkpoint, Visit(unit.call.began))
        return self._root.call.region if is_in_root else None

    def _drop_frames(self) -> None:
        """Drop the frames, which hold the variables of their functions."""
        self._root_caller = None
        self._regions.clear()


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

    def end(self, units: Iterable[Unit] | None = None, *, for_backward: bool = False) -> None:
        """Keep units no longer, None: all that it keeps, and free those that no other lease keeps.

        Args:
            units: the units; some of them may not be kept by this lease.
            for_backward: see `Unit.reshard`.
        """
        for unit in tuple(self.units if units is None else units):
            self.units.pop(unit, None)
            unit.leases.discard(self)
            if not unit.leases:
                unit.reshard(for_backward)


class Turn(NamedTuple):
    """A tick of the walk, and what happens to a unit there."""

    tick: int
    unit: Unit
    act: str
    """enter, leave or free."""


def plan_turns(units: Iterable[Unit]) -> list[Turn]:
    """List the turns of a backward through the calls that the units have noted, in the order of the walk.

    Units inside an activation checkpoint are entered together, and freed together: its second forward needs
    all of them. A resident unit is not entered.
    """
    turns = []
    for unit in units:
        if (visit := unit.visit) is not None:
            if not unit.is_resident:
                entered = unit.entered
                turns.append(((entered, visit.ended), Turn(entered, unit, "enter")))
            leave, free = last_turns(unit, visit.began)
            turns += (((leave.tick, True), leave), ((free.tick, False), free))
    turns.sort(key=itemgetter(0), reverse=True)
    return [turn for _, turn in turns]


def last_turns(unit: Unit, began: int) -> tuple[Turn, Turn]:
    """The turns in which a unit is left and freed, if the first of its calls began at a tick."""
    regions = () if unit.visit is None else unit.visit.regions
    freed = min([began, *map(attrgetter("began"), regions)])
    return Turn(began, unit, "leave"), Turn(freed, unit, "free")


class Walk:
    """Take the turns of one backward as gradients arrive.

    Args:
        units: all units of the model; those with noted calls are walked through.
        reducer: starts the reduction of the gradients of units that are left.
        lease: the lease on the units that the backward needs, and on those that it gathers.
        num_prefetch: the number of units whose gathers are started before they are entered.
    """

    def __init__(
        self, units: Iterable[Unit], reducer: Reducer, lease: Lease, *, num_prefetch: int = 0
    ) -> None:
        self._lease = lease
        self._turns = plan_turns(units)
        self._next = 0
        """The first turn that is still to be taken."""
        self.left = [turn.unit for turn in self._turns if turn.act == "leave"]
        """The units of the walk in the order of their ends, which is the order of reductions."""
        self._route = [turn.unit for turn in self._turns if turn.act == "enter"]
        self._num_entered = self._num_gathered = 0
        """The numbers of units of the route that were entered, and that gathers were started for."""
        self._reducer, self._num_prefetch = reducer, num_prefetch
        self._inside = {turn.unit for turn in self._turns if turn.unit.is_resident}
        self._now = self._turns[0].tick if self._turns else 0

    def enter(self, call: ForwardCall) -> None:
        """Take the turns up to the end of a call, since the gradient of one of its outputs has arrived."""
        self.take(call.ended)
        if call.unit not in self._inside:  # a call from before the last backward, or its graph comes again
            self._inside.add(call.unit)
            for turn in last_turns(call.unit, call.began):
                insort(self._turns, turn, lo=self._next, key=lambda turn: -turn.tick)

    def note_gradient(self, unit: Unit) -> None:
        """Start the reductions that are due and complete, since a gradient of a parameter has arrived."""
        if unit.visit is not None and unit not in self._inside:  # its outputs could not be watched
            self.take(unit.visit.ended)
        for turn in islice(self._turns, self._next, None):
            if turn.act == "leave" and turn.unit.is_complete:
                self._reducer.start(turn.unit)
            elif turn.act != "free":
                break

    def enter_again(self, unit: Unit, tick: int) -> ForwardCall:
        """Make the call of a second forward; autograd treats it as the call that it repeats.

        Take the turns up to the end of the last checkpoint around the unit.

        Args:
            unit: the unit that is called again inside this backward.
            tick: the time now on the clock of forwards; for a unit without noted calls.
        """
        visit = unit.visit or Visit(tick, tick)
        call = ForwardCall(unit, visit.began, min(self._now, visit.ended))
        if visit.regions:
            self.take(visit.regions[-1].ended)
        elif unit in self._route[self._num_gathered :]:  # an unknown kind of checkpoint: nothing more is over
            self._gather(self._route.index(unit) + 1)
        return call

    def take(self, tick: int = 0) -> None:
        """Take the turns up to a tick; by default all that are left: the backward is over, or has failed."""
        while self._next < len(self._turns) and self._turns[self._next].tick >= tick:
            _, unit, act = self._turns[self._next]
            self._next += 1
            if act == "enter":
                self._inside.add(unit)
                self._num_entered += 1
                self._gather(self._num_entered + self._num_prefetch)
            elif act == "leave":
                self._inside.discard(unit)
                self._reducer.start(unit)
            else:
                unit.slots.uninstall()
                self._lease.end((unit,))
        self._now = min(self._now, tick)

    def _gather(self, num: int) -> None:
        """Start the gathers of the first `num` units of the route."""
        for unit in self._route[self._num_gathered : num]:
            if unit.joins_backward:  # also without a backward on this rank: others may have one
                unit.unshard()
                self._lease.take(unit)
        self._num_gathered = max(self._num_gathered, num)
        for unit in self._route[num : num + 1]:
            unit.read_ahead()
