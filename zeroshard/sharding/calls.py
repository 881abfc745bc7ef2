"""The calls of units in forwards: when each of them begins and ends, and the activation checkpoint it is in.

Ranks whose graphs differ note the same calls. So the turns of a backward, which follow from the calls, are
the same on all ranks; see `backward.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

import torch

from zeroshard.sharding.autograd import is_in_backward, outermost_checkpoint
from zeroshard.sharding.unit import NEVER, ForwardCall, Region, Unit, Visit


class CallLog:
    """Notes the calls of the forwards that may have a backward, in `Unit.visit`.

    Args:
        units: the root unit first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units, self._root = tuple(units), units[0]
        self._tick = 0
        """The clock: it goes on at each beginning and end of a call."""
        self._notes = False
        """True while the forward under way may have a backward; all ranks alike."""
        self._num_open = 0
        """Calls that are under way."""
        self._root_caller: FrameType | None = None
        """The frame that called the root, while the root runs."""
        self._regions: dict[FrameType, Region] = {}
        """The activation checkpoints of the forward under way."""

    def tick(self) -> int:
        """The next tick of the clock."""
        self._tick += 1
        return self._tick

    def begin(self, unit: Unit, caller: FrameType, *, is_outermost: bool) -> None:
        """A forward of a unit begins, outside of any backward.

        Args:
            unit: its `call` is the new call until that ends.
            caller: a frame that runs as long as the call does.
            is_outermost: True for the root, and for a part that is called without the root.
        """
        if is_outermost:  # a part of it may be under no_grad on some ranks
            self._notes = torch.is_grad_enabled()
        call = ForwardCall(unit, self.tick())
        if unit.call.ended == NEVER and unit.call.began != NEVER:
            call.outer = unit.call
        unit.call = call
        self._num_open += 1
        if self._notes:
            unit.visit = unit.visit or Visit(call.began)
            call.region = None if unit.is_resident else self._find_region(unit, caller, is_outermost)
            unit.visit.region = call.region or unit.visit.region

    def end(self, unit: Unit) -> None:
        """The call of a unit is over, perhaps by an exception; also that of a second forward."""
        call = unit.call
        if call.ended == NEVER:
            call.ended = self.tick()
            if not is_in_backward():
                self._end_first(call)
        if call.outer is not None:
            unit.call = call.outer

    def drop_failed(self) -> None:
        """The root's forward has ended in an exception: it will have no backward."""
        for unit in self._units:
            if unit.visit is not None and unit.visit.began >= self._root.call.began:
                unit.visit = None
        self._num_open = 0
        self._forget_frames()

    def forget(self) -> None:
        """The calls so far have had their backward."""
        for unit in self._units:
            unit.visit = None

    def _end_first(self, call: ForwardCall) -> None:
        if call.unit.visit is not None and self._notes:
            call.unit.visit.ended = call.ended
        if call.region is not None:
            call.region.ended = call.ended
        self._num_open -= 1
        if not self._num_open:
            self._forget_frames()

    def _find_region(self, unit: Unit, caller: FrameType, is_outermost: bool) -> Region | None:
        checkpoint = outermost_checkpoint(caller, self._root_caller)
        if unit is self._root:
            self._root_caller = caller
        if checkpoint is not None:
            return self._regions.setdefault(checkpoint, Region(unit.call.began))
        return None if is_outermost else self._root.call.region

    def _forget_frames(self) -> None:
        """They hold the variables of their functions."""
        self._root_caller = None
        self._regions.clear()
