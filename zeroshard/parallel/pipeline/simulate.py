"""A simulator of schedules: the times of all actions, lists that deadlock, and the activations in flight.

Each rank runs its actions one after the other. A message leaves when its action ends, and arrives after the
duration of a transfer. A rank takes the messages of another rank in order, so a message that it needs may
wait after an earlier one. Transfers take no time of the ranks and do not slow each other down.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import (
    END_BACKWARD,
    Action,
    ChunkTransfer,
    Kind,
    Schedule,
    check_actions,
    needed_actions,
    plan_exchanges,
)

PerChunk = float | tuple[float, ...]
"""One number for all chunks, or a number for each."""


@dataclass(frozen=True, kw_only=True)
class ActionCosts:
    """The durations of actions, in any unit of time.

    The defaults are the usual ones of papers: a forward takes 1, a whole backward 2. Unshard, reshard and
    reduce take no time here, as they run during compute.

    Raises:
        ValueError: a duration is negative, infinite or not a number.
    """

    forward: PerChunk = 1.0
    backward_input: PerChunk = 1.0
    """Duration of the gradient of the input, the first half of a backward."""
    backward_weight: PerChunk = 1.0
    """Duration of the gradient of the weights, the second half."""
    recompute: PerChunk = 1.0
    transfer: PerChunk = 0.0
    """Time between a send and the arrival, for a chunk's output and, the same way back, for its gradient."""
    step: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            for number in given if isinstance(given, tuple) else (given,):
                if not (isfinite(number) and number >= 0):
                    raise ValueError(f"{field.name}: expected a duration of at least 0, got {number}")

    def of(self, action: Action) -> float:
        """Return the duration of an action."""
        parts = _PARTS.get(action.kind, ())
        return sum((self._at(name, action.chunk) for name in parts), start=0.0)

    def transfer_after(self, chunk: int) -> float:
        """Return the duration of a transfer between a chunk and the next one, in either direction."""
        return self._at("transfer", chunk)

    def require_chunks(self, num_chunks: int) -> None:
        """Raise ValueError if there is a list of numbers for another number of chunks."""
        for field in fields(self):
            given = getattr(self, field.name)
            needed = num_chunks - (field.name == "transfer")  # nothing leaves the last chunk
            if isinstance(given, tuple) and not needed <= len(given) <= num_chunks:
                raise ValueError(f"{field.name}: expected {num_chunks} numbers, got {len(given)}")

    def _at(self, name: str, chunk: int | None) -> float:
        given: PerChunk = getattr(self, name)
        if isinstance(given, tuple):
            assert chunk is not None  # only a step has none
            return given[chunk]
        return given


_PARTS: dict[Kind, tuple[str, ...]] = {
    Kind.FORWARD: ("forward",),
    Kind.BACKWARD: ("backward_input", "backward_weight"),
    Kind.INPUT_GRADIENT: ("backward_input",),
    Kind.WEIGHT_GRADIENT: ("backward_weight",),
    Kind.RECOMPUTE: ("recompute",),
    Kind.STEP: ("step",),
}


class ActionTime(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimes:
    """The start and the end of all actions, for each pipeline rank in the order of its list."""

    spans: tuple[tuple[ActionTime, ...], ...]

    @property
    def makespan(self) -> float:
        """The time at which the last action ends."""
        return max(span.end for spans in self.spans for span in spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time in which each pipeline rank runs actions."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_share(self) -> float:
        """The part of the time of all ranks in which they run nothing; 0 if nothing takes time."""
        whole = self.makespan * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0


class _ReceiveMessage(NamedTuple):
    transfer: ChunkTransfer
    before: Action


class _SendMessage(NamedTuple):
    transfer: ChunkTransfer


_Operation = Action | _ReceiveMessage | _SendMessage


class _MessageQueue:
    """The messages from one rank to another: the time at which each was offered, accepted and received."""

    def __init__(self, max_unreceived: int | None) -> None:
        self.max_unreceived = max_unreceived
        self.offered: list[float] = []
        self.received: list[float] = []

    def room_for(self, index: int) -> float | None:
        """Return the time from which a message has room. None: the target has to receive others first."""
        if self.max_unreceived is None or index < self.max_unreceived:
            return 0.0
        earlier = index - self.max_unreceived
        return self.received[earlier] if earlier < len(self.received) else None

    def receive(self, now: float, duration: float) -> float:
        """Receive the next message at time `now` or later; return the time at which it is there."""
        index = len(self.received)
        room = now if self.max_unreceived == 0 else self.room_for(index)
        assert room is not None  # all earlier messages have been received
        self.received.append(max(now, max(self.offered[index], room) + duration))
        return self.received[-1]


class _Simulation:
    """The state of a simulation."""

    def __init__(self, schedule: Schedule, costs: ActionCosts, max_unreceived: int | None) -> None:
        costs.require_chunks(schedule.num_chunks)
        self.costs = costs
        self.needed = needed_actions(schedule)
        self.placement = schedule.placement
        self.programs: list[list[_Operation]] = [[] for _ in range(schedule.num_ranks)]
        for program, exchanges in zip(self.programs, plan_exchanges(schedule), strict=True):
            for action, receives, sends in exchanges:
                program.extend(_ReceiveMessage(one, action) for one in receives)
                program.append(action)
                program.extend(map(_SendMessage, sends))
        self.positions = [0] * schedule.num_ranks
        self.clocks = [0.0] * schedule.num_ranks
        self.spans: list[list[ActionTime]] = [[] for _ in range(schedule.num_ranks)]
        self.done: set[Action] = set()
        self.channels: dict[tuple[int, int], _MessageQueue] = defaultdict(
            lambda: _MessageQueue(max_unreceived)
        )
        self.offers: dict[ChunkTransfer, int] = {}

    def advance(self, rank: int) -> bool:
        """Run the operations of a rank up to one that has to wait; True if there was any progress."""
        before = self.positions[rank], len(self.offers)
        while self.positions[rank] < len(self.programs[rank]) and self.blocked(rank) is None:
            self._run(rank, self.programs[rank][self.positions[rank]])
            self.positions[rank] += 1
        return (self.positions[rank], len(self.offers)) != before

    def blocked(self, rank: int) -> tuple[int, str] | None:
        """Return the rank for which a rank cannot run its next operation, with the reason; None if it can."""
        operation = self.programs[rank][self.positions[rank]]
        if isinstance(operation, _ReceiveMessage):
            transfer = operation.transfer
            if transfer in self.offers:
                return None
            return transfer.source, f"{operation.before} waits for {transfer.action}"
        if isinstance(operation, _SendMessage):
            transfer = operation.transfer
            index, channel = self._offer(transfer)
            if channel.room_for(index) is not None:
                return None
            buffers = f"at most {channel.max_unreceived} unreceived"
            return transfer.target, f"the send of the {transfer} waits for a receive, {buffers}"
        for action in self.needed.get(operation, ()):  # actions of other ranks send a message
            if action not in self.done and self.placement[action.place[0]] == rank:
                return rank, f"{operation} waits for {action}, which comes later in its own list"
        return None

    def _offer(self, transfer: ChunkTransfer) -> tuple[int, _MessageQueue]:
        """Offer a message if it has not been; return its number among the messages of its channel."""
        channel = self.channels[transfer.source, transfer.target]
        if transfer not in self.offers:
            self.offers[transfer] = len(channel.offered)
            channel.offered.append(self.clocks[transfer.source])
        return self.offers[transfer], channel

    def _run(self, rank: int, operation: _Operation) -> None:
        if isinstance(operation, _ReceiveMessage):
            transfer = operation.transfer
            duration = self.costs.transfer_after(transfer.boundary)
            channel = self.channels[transfer.source, transfer.target]
            self.clocks[rank] = channel.receive(self.clocks[rank], duration)
        elif isinstance(operation, _SendMessage):
            index, channel = self._offer(operation.transfer)
            self.clocks[rank] = max(self.clocks[rank], channel.room_for(index) or 0.0)
        else:
            start = self.clocks[rank]
            self.clocks[rank] = start + self.costs.of(operation)
            self.spans[rank].append(ActionTime(operation, start, self.clocks[rank]))
            self.done.add(operation)

    def raise_deadlock(self, rank: int) -> None:
        """Raise a ValueError with the ranks that wait for each other in a circle; one has not ended."""
        path: list[int] = []
        while rank not in path:
            path.append(rank)
            blocked = self.blocked(rank)
            assert blocked is not None
            rank = blocked[0]
        circle = [(each, self.blocked(each)) for each in path[path.index(rank) :]]
        waits = "; ".join(f"pipeline rank {each}: {blocked[1]}" for each, blocked in circle if blocked)
        raise ValueError(f"expected lists that run to their end, got a deadlock: {waits}")


def simulate(
    schedule: Schedule, costs: ActionCosts | None = None, *, max_unreceived: int | None = None
) -> ScheduleTimes:
    """Return the times of all actions.

    Args:
        schedule: the lists of all ranks.
        costs: the durations. None: the defaults of `ActionCosts`.
        max_unreceived: messages from one rank to another that may be under way or wait there. A rank that
            would send one more waits until the other rank receives one. Here a rank receives directly before
            the action that needs the message. With 0 a send waits for its own receive. None: no limit.

    Raises:
        ValueError: ranks wait for each other, with their actions in the message; other errors of the lists
            (see `check_actions`); costs for another number of chunks.
    """
    if max_unreceived is not None and max_unreceived < 0:
        raise ValueError(f"max_unreceived: expected at least 0 or None, got {max_unreceived}")
    run = _Simulation(schedule, costs or ActionCosts(), max_unreceived)
    while sum(map(run.advance, range(schedule.num_ranks))):
        pass  # each rank goes on once before any goes on again, else the first ones are asked in vain
    for rank, program in enumerate(run.programs):
        if run.positions[rank] < len(program):
            run.raise_deadlock(rank)
    return ScheduleTimes(tuple(map(tuple, run.spans)))


class ActivationCounts(NamedTuple):
    """The most micro-batches that each pipeline rank holds at a time, over all of its chunks together."""

    per_rank: tuple[int, ...]
    """With activations: from the forward, or its recompute if it has one, to the end of the backward."""
    inputs_per_rank: tuple[int, ...]
    """With the input alone, for a recompute."""


def count_activations(schedule: Schedule, weights: Sequence[int] | None = None) -> ActivationCounts:
    """Count the activations in flight. Raises ValueError as `check_actions` does.

    Args:
        schedule: the lists of all ranks.
        weights: the numbers that count for a micro-batch in each chunk, such as bytes. None: 1.
    """
    check_actions(schedule)
    recomputed = {action.place for _, action in schedule if action.kind is Kind.RECOMPUTE}
    now, peak = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for rank, action in schedule:
        changes: dict[str, int] = {}
        if action.kind is Kind.FORWARD:
            changes = {"inputs" if action.place in recomputed else "whole": 1}
        elif action.kind is Kind.RECOMPUTE:
            changes = {"inputs": -1, "whole": 1}
        elif action.kind in END_BACKWARD:
            changes = {"whole": -1}
        for what, number in changes.items():
            now[what, rank] += number * (1 if weights is None else weights[action.place[0]])
            peak[what, rank] = max(peak[what, rank], now[what, rank])
    ranks = range(schedule.num_ranks)
    return ActivationCounts(*(tuple(peak[what, rank] for rank in ranks) for what in ("whole", "inputs")))
