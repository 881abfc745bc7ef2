"""Varuna's schedule: every rank but the last one recomputes, and does so while it would wait anyway.

A rank that is free takes a backward before a recompute, and a recompute before a forward. A recompute begins
so that the gradient arrives as it ends. Between its recompute and its backward a rank runs nothing else, so
the activations of one micro-batch are there at a time. The last rank runs the backward of a micro-batch
directly after its forward, and has nothing to recompute.

The order depends on the durations, so the builder simulates: it gives the next action to the rank that can
begin one first. The lists keep the order alone. A rank that reaches a recompute early begins it early.

Source: Athlur et al. 2022, "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", the part on
the schedule of micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule, backward, forward, frozen, loop
from zeroshard.parallel.pipeline.costs import Costs

_PRIORITY = {Kind.BACKWARD: 0, Kind.RECOMPUTE: 1, Kind.FORWARD: 2}


def varuna(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Return Varuna's schedule for given durations."""
    costs.require_chunks(num_ranks)
    builder = _Builder(num_ranks, num_microbatches, costs)
    options = [builder.next_of(rank) for rank in range(num_ranks)]
    while found := [option for option in options if option is not None]:
        option = min(found)
        builder.take(option)
        for rank in range(max(0, option.rank - 1), min(num_ranks, option.rank + 2)):  # who exchanges with it
            options[rank] = builder.next_of(rank)
    return Schedule(loop(num_ranks, 1), num_microbatches, frozen(builder.lists))


class _Option(NamedTuple):
    """An action that a rank can run next; the smallest option is taken."""

    start: float
    priority: int
    rank: int
    kind: Kind


class _Builder:
    """The lists so far, with the time at which each action ends."""

    def __init__(self, num_ranks: int, num_microbatches: int, costs: Costs) -> None:
        self.num_microbatches = num_microbatches
        self.costs = costs
        self.last = num_ranks - 1
        self.lists: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.free_from = [0.0] * num_ranks
        self.ends: dict[Action, float] = {}
        self.forwards = [0] * num_ranks
        self.backwards = [0] * num_ranks

    def next_of(self, rank: int) -> _Option | None:
        """Return the action that a rank would run next; None if it has to wait for others, or is done."""
        microbatch = self.backwards[rank]
        times: dict[Kind, float | None] = {}
        is_recomputed = Action(Kind.RECOMPUTE, rank, microbatch) in self.ends
        if microbatch < self.forwards[rank]:
            gradient = 0.0 if rank == self.last else self._arrival(backward(rank + 1, microbatch), rank)
            if rank == self.last or is_recomputed:
                times[Kind.BACKWARD] = gradient
            elif gradient is not None:
                times[Kind.RECOMPUTE] = gradient - self.costs.of(Action(Kind.RECOMPUTE, rank, microbatch))
        # By its time a backward comes directly after its recompute, but for the rounding of floats.
        if self.forwards[rank] < self.num_microbatches and not is_recomputed:
            before = forward(rank - 1, self.forwards[rank])
            times[Kind.FORWARD] = self._arrival(before, rank - 1) if rank else 0.0
        options = [
            _Option(max(self.free_from[rank], time), _PRIORITY[kind], rank, kind)
            for kind, time in times.items()
            if time is not None
        ]
        return min(options, default=None)

    def take(self, option: _Option) -> None:
        """Append an action to the list of its rank."""
        rank, kind = option.rank, option.kind
        numbers = self.forwards if kind is Kind.FORWARD else self.backwards
        action = Action(kind, rank, numbers[rank])
        self.free_from[rank] = self.ends[action] = option.start + self.costs.of(action)
        self.lists[rank].append(action)
        if kind is not Kind.RECOMPUTE:
            numbers[rank] += 1

    def _arrival(self, action: Action, boundary: int) -> float | None:
        """Return the time at which the message of an action arrives; None if it is in no list yet."""
        end = self.ends.get(action)
        return None if end is None else end + self.costs.transfer_after(boundary)
