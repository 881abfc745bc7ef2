"""A simulator of schedules: the times of all actions, lists that deadlock, and the activations in flight.

Each rank runs its actions one after the other. A message leaves when its action ends, and arrives after the
duration of a transfer. A rank takes the messages of another rank in order, so a message that it needs may
wait after an earlier one. Transfers take no time of the ranks and do not slow each other down.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import (
    BEGIN_BACKWARD,
    END_BACKWARD,
    Action,
    ActionMessages,
    Kind,
    Schedule,
    check_actions,
    plan_posts,
)


@dataclass(frozen=True, kw_only=True)
class ActionCosts:
    """The durations of actions, in any unit of time.

    The defaults are the usual ones of papers: a forward takes 1, a whole backward 2. Unshard, reshard and
    reduce take no time here, as they run during compute.

    Raises:
        ValueError: a duration is negative, infinite or not a number.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    """Duration of the gradient of the input, the first half of a backward."""
    backward_weight: float = 1.0
    """Duration of the gradient of the weights, the second half."""
    recompute: float = 1.0
    transfer: float = 0.0
    """Time between a send and the arrival, for a chunk's output and, the same way back, for its gradient."""
    step: float = 0.0

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if not (isfinite(number) and number >= 0):
                raise ValueError(f"{name}: expected a duration of at least 0, got {number}")

    def of(self, action: Action) -> float:
        """Return the duration of an action."""
        return sum((getattr(self, part) for part in _PARTS.get(action.kind, ())), start=0.0)


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


class _Simulation:
    """The state of a simulation; see `simulate` for its arguments."""

    def __init__(self, schedule: Schedule, costs: Sequence[ActionCosts], max_unreceived: int) -> None:
        self.costs, self.room, self.placement = costs, max_unreceived, schedule.placement
        self.needed = schedule.needed
        self.spans: list[list[ActionTime]] = [[] for _ in range(schedule.num_ranks)]
        self.done: set[Action] = set()
        self.queues = defaultdict[tuple[int, int], tuple[list[float], list[float]]](lambda: ([], []))
        """By sender and receiver of messages, the times at which these were offered, and received."""
        self.num_events = 0
        """Actions, sends and receives so far: ranks that add none wait for each other."""

    def run(self, rank: int, exchanges: Sequence[ActionMessages]) -> Iterator[tuple[int, str]]:
        """Run the list of a rank. Where it has to wait, yield the rank that it waits for, and the reason."""
        now = 0.0
        for action, receives, sends in exchanges:
            for message in receives:
                offered, received = self.queues[message.source, rank]
                while len(offered) == len(received):
                    yield message.source, f"{action} waits for {message.action}"
                index, duration = len(received), self.costs[0].transfer
                room_from = now if not self.room else self._room_for(index, received)
                now = max(now, max(offered[index], room_from) + duration)
                received.append(now)
                self.num_events += 1
            for before in self.needed.get(action, ()):  # actions of other ranks send a message
                while before not in self.done and self.placement[before.place[0]] == rank:
                    yield rank, f"{action} waits for {before}, which comes later in its own list"
            start, now = now, now + self.costs[action.chunk or 0].of(action)
            self.spans[rank].append(ActionTime(action, start, now))
            self.done.add(action)
            self.num_events += 1
            for message in sends:
                offered, received = self.queues[rank, message.target]
                index = len(offered)
                offered.append(now)
                self.num_events += 1
                while len(received) <= index - self.room:
                    buffers = f"at most {self.room} unreceived"
                    yield message.target, f"the send of the {message.label} waits for a receive, {buffers}"
                now = max(now, self._room_for(index, received))

    def _room_for(self, index: int, received: list[float]) -> float:
        """Return the time from which a message has room; all that it waits for have been received."""
        return received[index - self.room] if index >= self.room else 0.0


def _deadlock(waits: Mapping[int, tuple[int, str]]) -> ValueError:
    """Return the error for ranks that wait for each other in a circle, given the waits of all ranks."""
    path, rank = list[int](), next(iter(waits))
    while rank not in path:
        path.append(rank)
        rank = waits[rank][0]
    circle = "; ".join(f"pipeline rank {each}: {waits[each][1]}" for each in path[path.index(rank) :])
    return ValueError(f"expected lists that run to their end, got a deadlock: {circle}")


def simulate(
    schedule: Schedule,
    costs: ActionCosts | Sequence[ActionCosts] | None = None,
    *,
    max_unreceived: int | None = None,
) -> ScheduleTimes:
    """Return the times of all actions.

    Args:
        schedule: the lists of all ranks.
        costs: the durations, of all chunks alike or of each of them. None: the defaults of `ActionCosts`.
        max_unreceived: messages from one rank to another that may be under way or wait there. A rank that
            would send one more waits until the other rank receives one. Here a rank receives directly before
            the action that needs the message. With 0 a send waits for its own receive. None: no limit.

    Raises:
        ValueError: ranks wait for each other, with their actions in the message; other errors of the lists
            (see `check_actions`).
    """
    room = len(list(schedule)) if max_unreceived is None else max_unreceived  # room for all is no limit
    each = costs if isinstance(costs, Sequence) else [costs or ActionCosts()] * schedule.num_chunks
    state = _Simulation(schedule, each, room)
    programs = [state.run(rank, own) for rank, own in enumerate(schedule.exchanges)]
    num_before = -1
    while state.num_events > num_before:  # each rank goes on once before any goes on again
        num_before = state.num_events
        waits = {rank: wait for rank, one in enumerate(programs) if (wait := next(one, None)) is not None}
    if waits:
        raise _deadlock(waits)
    return ScheduleTimes(tuple(map(tuple, state.spans)))


class ActivationCounts(NamedTuple):
    """The most micro-batches that each pipeline rank holds at a time, over all of its chunks together."""

    per_rank: tuple[int, ...]
    """With activations: from the forward, or its recompute if it has one, to the end of the backward."""
    inputs_per_rank: tuple[int, ...]
    """With the input alone, for a recompute."""


def count_activations(schedule: Schedule) -> ActivationCounts:
    """Count the activations in flight. Raises ValueError as `check_actions` does."""
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
            now[what, rank] += number
            peak[what, rank] = max(peak[what, rank], now[what, rank])
    ranks = range(schedule.num_ranks)
    return ActivationCounts(*(tuple(peak[what, rank] for rank in ranks) for what in ("whole", "inputs")))


class ChunkBytes(NamedTuple):
    """Bytes of a micro-batch in a chunk, without those of its input."""

    output: int
    """Of its output, and so of the gradient of it; 0 of the last chunk."""
    kept: int
    """From the forward to the backward, with the output."""
    backward: int
    """The most in the place of `kept` while the backward runs, where units compute again."""
    waiting: int
    """From the first half of a backward to the second: the operands of the gradients of weights."""


def count_bytes(schedule: Schedule, chunks: Sequence[ChunkBytes]) -> tuple[int, ...]:
    """Return the most bytes of activations, their gradients and messages that each pipeline rank holds.

    A message takes memory from its post to the backward that needs it; the gradient of an input, until the
    rank sends another message the same way.
    """
    return tuple(max(_held(schedule, chunks, rank, steps)) for rank, steps in enumerate(schedule.exchanges))


def _held(
    schedule: Schedule, chunks: Sequence[ChunkBytes], rank: int, steps: Sequence[ActionMessages]
) -> Iterator[int]:
    """Yield the bytes that a pipeline rank holds at its fullest moments."""
    recomputed = {action.place for action, *_ in steps if action.kind is Kind.RECOMPUTE}
    now, sent = 0, Counter[int]()
    for (action, _, sends), posts in zip(steps, plan_posts(steps), strict=True):
        for message in posts:
            now += chunks[(message.action if message.is_activation else message.user).place[0]].output
        chunk, kind = action.chunk or 0, action.kind
        own, given = chunks[chunk], chunks[chunk - 1].output if chunk else 0
        if kind is Kind.RECOMPUTE or (kind is Kind.FORWARD and action.place not in recomputed):
            now += own.kept
        elif kind in BEGIN_BACKWARD:
            yield now + max(0, own.backward - own.kept)
            now += given - own.kept - own.output  # the gradients of its input and of its output
            now -= given if schedule.placement[chunk - 1] != rank else 0  # its input
            now += 0 if kind is Kind.BACKWARD else own.waiting
        elif kind is Kind.WEIGHT_GRADIENT:
            now -= own.waiting
        yield now
        for message in sends:
            now -= sent[message.target]
            sent[message.target] = 0 if message.is_activation else given
