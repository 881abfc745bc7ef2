"""The calls of units in forwards: their begins and ends, and the activation checkpoints around them.

Ranks whose graphs differ note the same calls. The turns of a backward follow from the calls, so they are the
same on all ranks; see `backward.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import FrameType
from weakref import ref

import torch

from zeroshard.internals.autograd import outermost_checkpoint
from zeroshard.sharding.unit import NEVER, ForwardCall, Region, Unit, Visit


class _Forward:
    """One forward. It is held by the calls that a graph holds, and by the last call of each unit."""

    __slots__ = ("__weakref__", "visits")

    def __init__(self) -> None:
        self.visits: dict[Unit, Visit] = {}


class CallLog:
    """Notes the calls of forwards, and puts into `Unit.visit` those that a backward may come to.

    Args:
        units: the root unit first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units, self._root = tuple(units), units[0]
        self._tick = 0
        """The clock: it goes on at each beginning and end of a call."""
        self._has_had_backward = False
        """True if a backward has gone through the forwards so far, and their graphs do not come again."""
        self._now: _Forward | None = None
        """The forward under way, if it may have a backward; the same on all ranks."""
        self._forwards: list[ref[_Forward]] = []
        """The forwards since the last backward; a dead one has no graph any more."""
        self._num_open = 0
        """Calls that are under way."""
        self._root_caller: FrameType | None = None
        """The frame that called the root, while the root runs."""
        self._regions: dict[FrameType, Region] = {}
        """The activation checkpoints of the forward under way."""
        self.name: Hashable = None
        """The name of forwards that begin, and of those that a backward comes to; None for no name."""
        self._named: dict[Hashable, _Forward] = {}

    def tick(self) -> int:
        """The next tick of the clock."""
        self._tick += 1
        return self._tick

    def begin(self, unit: Unit, caller: FrameType) -> None:
        """Note the begin of a unit's forward, outside of any backward.

        Args:
            unit: the unit; its `call` is the new call until that ends.
            caller: a frame that runs as long as the call does.
        """
        if self._has_had_backward:
            self._has_had_backward, self._forwards = False, []
        if not self._num_open:  # the outermost: parts of it may be under no_grad on some ranks
            self._now = _Forward() if torch.is_grad_enabled() else None
            self._forwards = [forward for forward in self._forwards if forward() is not None]
            if self._now is not None and self.name is not None:
                self._named[self.name] = self._now
            elif self._now is not None:
                self._forwards.append(ref(self._now))
        self._tick += 1
        call = ForwardCall(unit, self._tick)
        if unit.call.ended == NEVER and unit.call.began != NEVER:
            call.outer = unit.call
        unit.call = call
        self._num_open += 1
        if self._now is not None:
            call.forward = self._now
            if (visit := self._now.visits.get(unit)) is None:
                visit = self._now.visits[unit] = Visit(call.began)
            visit.num_calls += 1
            call.region = None if unit.is_resident else self._find_region(unit, caller)
            if call.region is not None and call.region not in visit.regions:
                visit.regions = (*visit.regions, call.region)

    def end(self, unit: Unit, is_second: bool) -> None:
        """Note the end of a unit's call, perhaps by an exception.

        Args:
            is_second: True for a forward that a backward runs again.
        """
        call = unit.call
        if call.ended == NEVER and call.began != NEVER:  # a hook before ours may have failed
            self._tick += 1
            call.ended = self._tick
            if not is_second:
                self._end_first(call)
        if call.outer is not None:
            unit.call = call.outer

    def collect(self) -> None:
        """Begin a backward: give each unit its calls in all forwards that the backward may come to."""
        for unit in self._units:
            unit.visit = None
        unnamed = [reference() for reference in self._forwards]
        for forward in unnamed if self.name is None else [self._named.get(self.name)]:
            if forward is not None:
                for unit, visit in forward.visits.items():
                    unit.visit = visit if unit.visit is None else unit.visit.and_then(visit)

    def forget(self, name: Hashable) -> None:
        """Forget a forward with a name: no backward comes to it any more."""
        self._named.pop(name, None)

    def forget_named(self) -> None:
        """Forget all forwards with names."""
        self._named.clear()

    def drop_failed(self) -> None:
        """Forget the root's forward, which has ended in an exception and will have no backward."""
        self._forwards = [forward for forward in self._forwards if forward() is not self._now]
        self._now = None
        self._num_open = 0
        self._forget_frames()

    def end_backward(self) -> None:
        """Note that the calls so far have had their backward: the next call forgets them."""
        self._has_had_backward = True

    def _end_first(self, call: ForwardCall) -> None:
        if self._now is not None and call.unit in self._now.visits:
            self._now.visits[call.unit].ended = call.ended
        if call.region is not None:
            call.region.ended = call.ended
        self._num_open -= 1
        if not self._num_open:
            self._forget_frames()

    def _find_region(self, unit: Unit, caller: FrameType) -> Region | None:
        checkpoint = outermost_checkpoint(caller, self._root_caller)
        is_in_root = self._root_caller is not None
        if unit is self._root:
            self._root_caller = caller
        if checkpoint is not None:
            return self._regions.setdefault(checkpoint, Region(unit.call.began))
        return self._root.call.region if is_in_root else None

    def _forget_frames(self) -> None:
        """Drop the frames, which hold the variables of their functions."""
        self._root_caller = None
        self._regions.clear()
