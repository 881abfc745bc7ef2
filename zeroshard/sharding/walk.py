"""The calls of units in forwards, hooks of their outputs, the walk of a backward through them, and leases.

Every call of a unit begins and ends at a tick of the runtime's clock. Autograd runs nodes in the reverse
order of their creation. So when the gradient of an output arrives, the calls that began after that output was
made have had their backward.

    forward    0 root(   1 a(   2 )a   3 b(   4 c(   5 )c   6 )b   7 )root
    backward   enter root, enter b, enter c, leave c, leave b, enter a, leave a, leave root

A unit is gathered when it is entered, or `num_prefetch` units earlier. To leave a unit is to start the
reduction of its gradients and to free it. A unit with several calls is entered at its last call and left at
its first. Units inside one activation checkpoint are entered together, and freed together.

[Note: One order of collectives] All ranks of a shard group make the same calls, as each call gathers. So they
have the same list of turns, whatever part of the graph the loss of a rank depends on. They take the turns in
the order of the list: a turn that nothing led to on this rank is taken when a later turn comes. Therefore
they issue the same gathers and reductions in the same order, on any number of communicators. The list covers
the forwards whose graphs are alive, and torch's own activation checkpoints; docs/architecture.md names the
programs outside.

[Note: Leases] A lease is a reason to keep units gathered. A unit is freed when its last lease is released.

lease          held                                     released
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

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from itertools import count
from operator import attrgetter, itemgetter
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from zeroshard.internals.autograd import hook_if_made, outermost_checkpoint
from zeroshard.sharding.reducer import Reducer
from zeroshard.sharding.unit import LATEST, NEVER, ForwardCall, Ticks, Unit


class Visit(NamedTuple):
    """A unit in a backward: its first and its last call in the forwards before, and the last checkpoint."""

    first: Ticks
    last: Ticks
    around: Ticks | None
    """The last activation checkpoint around any of its calls."""


class _Forward(dict[Any, Unit]):
    """The calls of one forward in the order of their begins, by their ticks; without a backward the units.

    The calls that a graph holds hold it.
    """


class CallLog:
    """Notes the calls of forwards, and lists those that a backward may come to.

    Args:
        units: the units whose calls have turns in a backward.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = frozenset(units)
        self._tick = count(1).__next__
        """The clock: it goes on at each beginning and end of a call."""
        self.forward = _Forward()
        """The forward under way, or the last one."""
        self.may_have_backward = False
        """True if it may have a backward; the same on all ranks."""
        self._outermost: Ticks | None = None
        """Its outermost call, while that is under way."""
        self._checkpoint: FrameType | None = None
        """The last activation checkpoint in it."""
        self._inside = Ticks(NEVER)
        """The calls inside of that."""
        self._forwards: list[ref[_Forward]] = []
        """The forwards since the last backward; a dead one has no graph any more."""
        self._num_past = 0
        """The first of them, through which a backward has gone: their graphs do not come again."""
        self.name: Hashable = None
        """The name of forwards that begin, and of those that a backward comes to; None for no name."""
        self.named: dict[Hashable, _Forward] = {}
        """The forwards with names that a backward may still come to."""

    def begin(self, unit: Unit) -> None:
        """Note the begin of a unit's forward, outside of any backward. Other units get a call, too."""
        call = ForwardCall(unit, Ticks(self._tick()))
        unit.under_way.append(call)
        if self._outermost is None and unit in self._units:
            self._outermost, self.forward = call.ticks, _Forward()
            self.may_have_backward = torch.is_grad_enabled()  # parts may be under no_grad on some ranks
            alive = [forward for forward in self._forwards[self._num_past :] if forward() is not None]
            self._forwards, self._num_past = alive, 0
            if self.may_have_backward and self.name is None:
                self._forwards.append(ref(self.forward))
            elif self.may_have_backward:
                self.named[self.name] = self.forward
        if self.may_have_backward and unit.freed_inside:
            call.ticks.around = self._find_checkpoint(call)
        if unit in self._units:
            call.forward = self.forward
            self.forward[call.ticks if self.may_have_backward else unit] = unit

    def end(self, unit: Unit) -> None:
        """Note the end of a unit's call outside of any backward, perhaps by an exception."""
        ticks = unit.under_way.pop().ticks
        ticks.ended = ticks.whole.ended = self._tick()  # a call may stand for the checkpoint of those inside
        if ticks is self._outermost:
            self._outermost = self._checkpoint = None  # a frame holds the variables of its function

    def _find_checkpoint(self, call: ForwardCall) -> Ticks | None:
        frame = outermost_checkpoint()  # a reentrant one is refused
        for outer in call.unit.recomputed_in:  # ranks may call it under no_grad, without a checkpoint
            if outer.under_way:
                return outer.under_way[-1].ticks.whole
        if frame not in (None, self._checkpoint):
            self._checkpoint, self._inside = frame, Ticks(call.ticks.began)
        return self._inside if frame else None

    def drop_failed(self) -> None:
        """Drop the root's forward, which has ended in an exception and will have no backward."""
        self._forwards = [forward for forward in self._forwards if forward() is not self.forward]
        self._outermost = self._checkpoint = None

    def collect(self) -> dict[Unit, Visit]:
        """Begin a backward: list the units that it may come to, through the calls in all of its forwards."""
        visits: dict[Unit, Visit] = {}
        unnamed = [reference() for reference in self._forwards]
        for forward in unnamed if self.name is None else [self.named.get(self.name)]:
            for call, unit in (forward or {}).items():
                first, last, around = visits.get(unit, (call, call, None))
                last = max(last, call, key=attrgetter("ended"))
                visits[unit] = Visit(first, last, call.around or around)
        return visits

    def end_backward(self) -> None:
        """Note that the calls so far have had their backward: the next forward forgets them."""
        self._num_past = len(self._forwards)


def hook_outputs(call: ForwardCall, tensors: Iterable[Tensor], hook: Callable[..., None]) -> bool:
    """Call `hook` with the gradient of each tensor that a call has made, and say if there is such a tensor.

    The gradient of one that was made before, and is handed on, may come when the unit is freed.
    """
    # A tensor of a unit inside has its hook: the outer call begins first.
    return True in [hook_if_made(one, call.first_node, partial(hook, call)) for one in tensors]


class Lease:
    """One reason to keep units gathered."""

    def __init__(self) -> None:
        self.units: dict[Unit, None] = {}
        """The units that it keeps, in the order in which it got them."""

    def hold(self, *units: Unit) -> None:
        """Keep units gathered from now on. The caller gathers them."""
        for unit in units:
            self.units[unit] = None
            unit.leases.add(self)

    def release(self, units: Iterable[Unit] | None = None, *, for_backward: bool = False) -> None:
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
    order: int
    """Of turns with one tick the one with the highest number comes first."""
    unit: Unit
    act: str
    """gather, leave or free; or read: values in files are read ahead of the next gather."""


_by_tick = itemgetter(0, 1)


def plan_turns(visits: Mapping[Unit, Visit], num_prefetch: int) -> list[Turn]:
    """List the turns of a backward through units; the first one comes last.

    Units inside an activation checkpoint are entered together, and freed together: its second forward needs
    all of them. A resident unit is not gathered.

    Args:
        visits: the units.
        num_prefetch: the number of units whose gathers are started before they are entered.
    """
    route = [(visit.last, unit) for unit, visit in visits.items() if not unit.is_resident]
    route.sort(key=lambda place: (place[0].whole.ended, place[0].ended), reverse=True)
    turns: list[Turn] = []
    for number, (_, unit) in enumerate(route):
        entered, _ = route[max(0, number - num_prefetch)]
        if unit.in_files and turns:  # directly after the gather of the unit before it
            turns.append(Turn(turns[-1].tick, 1 - 2 * number, unit, "read"))
        turns.append(Turn(entered.whole.ended, -2 * number, unit, "gather"))
    for unit, visit in visits.items():
        turns += last_turns(unit, visit.first)
    return sorted(turns, key=_by_tick)


def last_turns(unit: Unit, call: Ticks) -> tuple[Turn, Turn]:
    """The turns in which a unit is left and freed, if this is the first of its calls."""
    return Turn(call.began, 1, unit, "leave"), Turn(call.whole.began, 0, unit, "free")


class Walk:
    """Take the turns of one backward as gradients arrive.

    Args:
        visits: the units that are walked through.
        reducer: starts the reduction of the gradients of units that are left.
        lease: the lease on the units that the backward needs, and on those that it gathers.
        num_prefetch: the number of units whose gathers are started before they are entered.
    """

    def __init__(
        self, visits: Mapping[Unit, Visit], reducer: Reducer, lease: Lease, *, num_prefetch: int = 0
    ) -> None:
        self._visits, self._reducer, self._lease = visits, reducer, lease
        self._turns = plan_turns(visits, num_prefetch)
        """The turns that are still to be taken, the next one last."""
        self.left = [turn.unit for turn in reversed(self._turns) if turn.act == "leave"]
        """The units of the walk in the order of their ends, which is the order of reductions."""
        self._to_leave = set(self.left)

    def enter(self, call: ForwardCall) -> None:
        """Take the turns up to the end of a call, since the gradient of one of its outputs has arrived."""
        self.take(call.ticks.ended)
        if call.unit not in self._to_leave:  # a call from before the last backward, or its graph comes again
            self._to_leave.add(call.unit)
            self._turns = sorted([*self._turns, *last_turns(call.unit, call.ticks)], key=_by_tick)

    def note_gradient(self, unit: Unit) -> None:
        """Start the reductions that are due and complete, since a gradient of a parameter has arrived."""
        if unit in self._visits and not unit.is_resident:  # its outputs might not be watched
            self.take(self._visits[unit].last.ended)
        for turn in reversed(self._turns):
            if turn.act == "leave" and turn.unit.is_complete:
                self._reducer.start(turn.unit)
            elif turn.act != "free":
                break

    def enter_again(self, unit: Unit) -> ForwardCall:
        """Make the call of a second forward; autograd treats it as the calls that it repeats.

        Take the turns up to the end of the last checkpoint around the unit.
        """
        if unit not in self._visits:  # called inside this backward alone
            return ForwardCall(unit, Ticks(LATEST, LATEST))
        first, last, around = self._visits[unit]
        if around is not None:
            self.take(around.ended)
        else:  # perhaps an unknown kind of checkpoint: nothing more is over
            ahead = [turn.unit for turn in reversed(self._turns) if turn.act == "gather"]
            for earlier in ahead[: ahead.index(unit) + 1] if unit in ahead else ():
                self._gather(earlier)
        return ForwardCall(unit, Ticks(first.began, last.ended))

    def take(self, tick: int = 0) -> None:
        """Take the turns up to a tick; by default all that are left: the backward is over, or has failed."""
        while self._turns and self._turns[-1].tick >= tick:
            _, _, unit, act = self._turns.pop()
            if act == "gather":
                self._gather(unit)
            elif act == "leave":
                self._to_leave.discard(unit)
                self._reducer.start(unit)
            elif act == "read":
                unit.read_ahead()
            else:
                unit.slots.uninstall()
                self._lease.release((unit,))

    def _gather(self, unit: Unit) -> None:
        if unit.joins_backward:  # also without a backward on this rank: others may have one
            unit.unshard()
            self._lease.hold(unit)
