"""The sends and receives of a schedule, which follow from its actions and the placement of its chunks.

    forward of chunk c       --activation-->  forward of chunk c + 1
    backward of chunk c      <---gradient---  backward, or gradient of the input, of chunk c + 1

Two chunks on one rank hand tensors over without a transfer. A send comes directly after the action that
produces it, and a receive before the action that needs it.

[Note: Messages of two ranks have one order]
Messages from one rank to another may be matched by their order alone, so both sides must count alike. The
receiver takes the order of the sender. An action that needs the third message therefore receives the first
two before it, if nobody has yet; they wait in its memory. The alternative is to number messages by chunk and
micro-batch, but collectives of NCCL have no such tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import BEGIN_BACKWARD, Action, Kind, Schedule
from zeroshard.parallel.pipeline.check import check_actions


class Transfer(NamedTuple):
    """A message from one pipeline rank to another.

    `action` is the action of the source that produces it: a forward for an activation, otherwise the backward
    whose input gradient it is. `user` is the action of the target that needs it.
    """

    action: Action
    user: Action
    source: int
    target: int

    @property
    def is_activation(self) -> bool:
        """True for an activation, False for a gradient."""
        return self.action.kind is Kind.FORWARD

    @property
    def boundary(self) -> int:
        """The chunk before the boundary that the message crosses."""
        chunk = (self.action if self.is_activation else self.user).chunk
        assert chunk is not None
        return chunk

    def __str__(self) -> str:
        word = "activation" if self.is_activation else "gradient"
        return f"{word} of {self.action} from pipeline rank {self.source} to {self.target}"


@dataclass(frozen=True)
class Exchange:
    """An action with its messages.

    Args:
        action: the action.
        needed: the messages that the action itself needs.
        receives: the messages to receive before it, in the order of the sender. They are those that it needs,
            and earlier ones of the same sender that nobody has received.
        sends: the messages to send after it.
    """

    action: Action
    needed: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


def needed_actions(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """Return for each compute action the actions, of all ranks, that must end before it begins."""
    listed = dict.fromkeys(action for _, action in schedule if action.is_compute)
    return {action: tuple(_needed(action, listed)) for action in listed}


def _needed(action: Action, listed: Collection[Action]) -> Iterator[Action]:
    kind, chunk, microbatch = action
    assert chunk is not None
    if kind is Kind.FORWARD:
        before = Action(Kind.FORWARD, chunk - 1, microbatch)
        return (each for each in (before,) if chunk)
    if kind is Kind.RECOMPUTE:
        return iter((Action(Kind.FORWARD, chunk, microbatch),))
    if kind is Kind.WEIGHT_GRADIENT:
        return iter((Action(Kind.INPUT_GRADIENT, chunk, microbatch),))
    own = (Action(Kind.FORWARD, chunk, microbatch), Action(Kind.RECOMPUTE, chunk, microbatch))
    later = (Action(each, chunk + 1, microbatch) for each in BEGIN_BACKWARD)
    return (each for each in (*own, *later) if each in listed)


def plan_exchanges(schedule: Schedule) -> tuple[tuple[Exchange, ...], ...]:
    """Return for each pipeline rank its actions with their messages, in the order of its list.

    For each ordered pair of ranks the messages have one order, see [Note: Messages of two ranks have one
    order].

    Raises:
        ValueError: see `check_actions`. Lists in which ranks wait for each other are found by `simulate`.
    """
    check_actions(schedule)
    needed: dict[Action, list[Transfer]] = defaultdict(list)
    sent: dict[Action, list[Transfer]] = defaultdict(list)
    places = {action: rank for rank, action in schedule if action.is_compute}
    for user, producers in needed_actions(schedule).items():
        for action in producers:
            if places[action] != places[user]:
                transfer = Transfer(action, user, places[action], places[user])
                needed[user].append(transfer)
                sent[action].append(transfer)
    waiting: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for _, action in schedule:
        for transfer in sent[action]:
            waiting[transfer.source, transfer.target].append(transfer)
    queues = {pair: iter(transfers) for pair, transfers in waiting.items()}
    return tuple(_plan_rank(actions, needed, sent, queues) for actions in schedule.lists)


def _plan_rank(
    actions: tuple[Action, ...],
    needed: dict[Action, list[Transfer]],
    sent: dict[Action, list[Transfer]],
    queues: dict[tuple[int, int], Iterator[Transfer]],
) -> tuple[Exchange, ...]:
    received: set[Transfer] = set()
    exchanges = []
    for action in actions:
        receives: list[Transfer] = []
        for transfer in needed.get(action, ()):
            queue = queues[transfer.source, transfer.target]
            while transfer not in received:
                receives.append(next(queue))
                received.add(receives[-1])
        exchanges.append(
            Exchange(action, tuple(needed.get(action, ())), tuple(receives), tuple(sent.get(action, ())))
        )
    return tuple(exchanges)


def plan_transfers(schedule: Schedule) -> tuple[tuple[Transfer, ...], ...]:
    """Return for each pipeline rank its sends and receives, in order.

    Raises:
        ValueError: see `plan_exchanges`.
    """
    return tuple(
        tuple(transfer for exchange in exchanges for transfer in (*exchange.receives, *exchange.sends))
        for exchanges in plan_exchanges(schedule)
    )
