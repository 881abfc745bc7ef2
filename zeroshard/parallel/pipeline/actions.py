"""Schedules of a pipeline as data: the actions of each pipeline rank, in order, and their text.

A *chunk* is a contiguous run of the model's layers. Chunks are numbered over all ranks from 0, in the order
of the model. A *pipeline rank* is the place of a rank on the axis pp. The *placement* names the pipeline
rank of each chunk. An action is written as chunk, kind, micro-batch, so `0F3` is the forward of chunk 0 for
micro-batch 3:

    rank 0    0F0 0F1 0F2     0B0     0B1     0B2
    rank 1        1F0 1B0 1F1 1B1 1F2 1B2

    text      0F0,0F1,0F2,0B0,0B1,0B2        a line for each rank; a comma between two actions;
              1F0,1B0,1F1,1B1,1F2,1B2        an empty cell has no meaning

Source: the notation is as in the CSV files of torch.distributed.pipelining. `R` and `STEP` are additions.

The sends and receives of a schedule follow from its actions and its placement:

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

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import product
from typing import NamedTuple


class Kind(Enum):
    """The kind of an action; the value is its text."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of the input and of the weights together."""
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECOMPUTE = "R"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"
    STEP = "STEP"

    # That of Enum is written in Python, and takes as long as all the rest of a key.
    __hash__ = object.__hash__


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE)
"""The kinds that compute one micro-batch in one chunk."""

BEGIN_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""The kinds that give the gradient of a chunk's input."""

END_BACKWARD = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
"""The kinds after which nobody needs the activations of a micro-batch."""

Place = tuple[int, int]
"""A chunk and a micro-batch."""

_TEXT = re.compile(r"(\d*)([A-Z_]+)(\d*)")


class Action(NamedTuple):
    """An action of a pipeline rank.

    `chunk` is None for a step of all chunks of the rank. `microbatch` is None for an action of the whole
    batch: unshard, reshard, reduce or step.
    """

    kind: Kind
    chunk: int | None
    microbatch: int | None

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else self.chunk
        return f"{chunk}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """True if the action computes one micro-batch in one chunk."""
        return self.kind in COMPUTE

    @property
    def place(self) -> Place:
        """The chunk and the micro-batch of a compute action."""
        assert self.chunk is not None
        assert self.microbatch is not None
        return self.chunk, self.microbatch

    def is_step_of(self, chunk: int | None) -> bool:
        """True for a step of a chunk, perhaps with the other chunks of its rank."""
        return self.kind is Kind.STEP and self.chunk in (None, chunk)


STEP = Action(Kind.STEP, None, None)
"""The step of all chunks of a rank."""


def parse_action(text: str) -> Action:
    """Return the action that a text such as `0F3`, `1UNSHARD` or `STEP` names.

    Raises:
        ValueError: the text has another form, or lacks a number that its kind needs.
    """
    match, kinds = _TEXT.fullmatch(text.strip()), {kind.value: kind for kind in Kind}
    chunk, word, microbatch = match.groups() if match is not None else ("", "", "")
    kind = kinds.get(word)
    if kind is None or (not chunk and kind is not Kind.STEP) or (not microbatch and kind in COMPUTE):
        raise ValueError(
            f"expected an action as chunk, kind and micro-batch, such as 0F3, got {text!r}: kinds are "
            f"{', '.join(kinds)}; sends and receives follow from these"
        )
    return Action(kind, int(chunk) if chunk else None, int(microbatch) if microbatch else None)


@dataclass(frozen=True)
class Schedule:
    """The actions of all pipeline ranks for one batch.

    Args:
        placement: the pipeline rank of each chunk.
        num_microbatches: the micro-batches of the batch.
        lists: the actions of each pipeline rank, in the order in which it runs them.

    Raises:
        ValueError: there is no such rank, chunk or micro-batch. `check_actions` and `simulate` check the
            rest.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    lists: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"expected at least 1 micro-batch, got {self.num_microbatches}")
        if set(self.placement) != set(range(self.num_ranks)):
            raise ValueError(
                f"expected a placement with a chunk on each of {self.num_ranks} pipeline ranks, "
                f"got {self.placement}"
            )
        for rank, action in self:
            ends = self.num_chunks, self.num_microbatches
            for noun, number, end in zip(("chunk", "micro-batch"), action[1:], ends, strict=True):
                if number is not None and number >= end:
                    raise ValueError(f"pipeline rank {rank}: expected a {noun} below {end}, got {action}")

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Iterate over all actions with their ranks, rank by rank."""
        return ((rank, action) for rank, actions in enumerate(self.lists) for action in actions)

    def __str__(self) -> str:
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.lists)

    @property
    def num_ranks(self) -> int:
        """The pipeline ranks."""
        return len(self.lists)

    @property
    def num_chunks(self) -> int:
        """The chunks of all ranks."""
        return len(self.placement)

    @cached_property
    def forwards(self) -> Schedule:
        """The forwards alone, in the same order: for an evaluation."""
        return self.with_lists([a for a in actions if a.kind is Kind.FORWARD] for actions in self.lists)

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each pipeline rank."""
        return tuple(
            tuple(chunk for chunk, place in enumerate(self.placement) if place == rank)
            for rank in range(self.num_ranks)
        )

    @cached_property
    def needed(self) -> dict[Action, tuple[Action, ...]]:
        """For each compute action the actions, of all ranks, that must end before it begins."""
        listed = dict.fromkeys(action for _, action in self if action.is_compute)
        found = {}
        for action in listed:
            chunk, microbatch = action.place
            needed = (Action(kind, chunk + after, microbatch) for kind, after in _NEEDED[action.kind])
            found[action] = tuple(one for one in needed if one in listed)
        return found

    @cached_property
    def exchanges(self) -> tuple[tuple[ActionMessages, ...], ...]:
        """For each pipeline rank its actions with their messages, in the order of its list.

        For each ordered pair of ranks the messages have one order, see [Note: Messages of two ranks have one
        order].

        Raises:
            ValueError: see `check_actions`. Lists in which ranks wait for each other are found by `simulate`.
        """
        check_actions(self)
        needed: dict[Action, list[ChunkTransfer]] = defaultdict(list)
        sent: dict[Action, list[ChunkTransfer]] = defaultdict(list)
        places = {action: rank for rank, action in self if action.is_compute}
        for user, producers in self.needed.items():
            for action in producers:
                if places[action] != places[user]:
                    transfer = ChunkTransfer(action, user, places[action], places[user])
                    needed[user].append(transfer)
                    sent[action].append(transfer)
        waiting: dict[tuple[int, int], deque[ChunkTransfer]] = defaultdict(deque)
        for _, action in self:
            for transfer in sent[action]:
                waiting[transfer.source, transfer.target].append(transfer)
        received: set[ChunkTransfer] = set()
        planned: list[list[ActionMessages]] = [[] for _ in self.lists]
        for rank, action in self:
            receives: list[ChunkTransfer] = []
            for transfer in needed[action]:
                while transfer not in received:
                    receives.append(waiting[transfer.source, transfer.target].popleft())
                    received.add(receives[-1])
            planned[rank].append(ActionMessages(action, tuple(receives), tuple(sent[action])))
        return tuple(map(tuple, planned))

    def with_lists(self, lists: Iterable[Iterable[Action]]) -> Schedule:
        """Return the schedule with other lists of actions."""
        return Schedule(self.placement, self.num_microbatches, frozen(lists))


def parse_schedule(text: str) -> Schedule:
    """Return the schedule of a text that `str` of a schedule gives, or that a user has written.

    The placement follows from the forwards, the number of micro-batches from the largest one.

    Raises:
        ValueError: an action has another form, two ranks have forwards of one chunk, or a chunk has none.
    """
    rows = [row for row in text.splitlines() if row.strip(", \t")]
    lists = tuple(_parse_row(number, row) for number, row in enumerate(rows))
    compute = [action for actions in lists for action in actions if action.is_compute]
    if not compute:
        raise ValueError("expected a line of actions for each pipeline rank, got none")
    places: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for chunk in {action.place[0] for action in actions if action.kind is Kind.FORWARD}:
            if (other := places.setdefault(chunk, rank)) != rank:
                raise ValueError(f"expected chunk {chunk} on one rank, got ranks {other} and {rank}")
    if sorted(places) != list(range(len(places))):
        raise ValueError(f"expected forwards of the chunks 0 to N - 1, got forwards of {sorted(places)}")
    placement = tuple(places[chunk] for chunk in range(len(places)))
    return Schedule(placement, max(action.place[1] for action in compute) + 1, lists)


def _parse_row(number: int, row: str) -> tuple[Action, ...]:
    try:
        return tuple(parse_action(cell) for cell in row.split(",") if cell.strip())
    except ValueError as error:
        raise ValueError(f"pipeline rank {number}: {error}") from None


def forward(chunk: int, microbatch: int) -> Action:
    """Return the forward of a micro-batch."""
    return Action(Kind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """Return the whole backward of a micro-batch."""
    return Action(Kind.BACKWARD, chunk, microbatch)


def loop(num_ranks: int, chunks_per_rank: int) -> tuple[int, ...]:
    """Return the placement that deals chunks out to the ranks in turn: 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * chunks_per_rank


def frozen(lists: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return lists of actions as a schedule holds them."""
    return tuple(map(tuple, lists))


def check_actions(schedule: Schedule) -> None:
    """Check that every chunk has one forward and one backward for each micro-batch, on its own rank.

    A schedule of forwards alone is one for an evaluation.

    Raises:
        ValueError: an action is missing, is there twice, or is on another rank.
    """
    for rank, action in schedule:
        if action.chunk is not None and (place := schedule.placement[action.chunk]) != rank:
            raise ValueError(f"expected {action} on pipeline rank {place}, got it on {rank}")
    counts = Counter(action for _, action in schedule if action.is_compute)
    is_evaluation = all(action.kind is Kind.FORWARD for action in counts)
    expected = ("F",) if is_evaluation else ("FB", "FIW")
    for chunk, microbatch in product(range(schedule.num_chunks), range(schedule.num_microbatches)):
        listed = [Action(kind, chunk, microbatch) for kind in COMPUTE]
        own = [action for action in listed for _ in range(counts[action])]
        if "".join(action.kind.value for action in own).removesuffix("R") not in expected:
            words, got = " or ".join(map(", ".join, expected)), ", ".join(map(str, own)) or "none"
            where = f"chunk {chunk} and micro-batch {microbatch}"
            raise ValueError(f"expected {words} of {where}, each once, got {got}")


@dataclass(frozen=True, eq=False)
class ChunkTransfer:
    """A message from one pipeline rank to another. It is one object in all batches, so it is a quick key.

    `action` is the action of the source that produces it: a forward for an activation, otherwise the backward
    whose input gradient it is. `user` is the action of the target that needs it.
    """

    action: Action
    user: Action
    source: int
    target: int

    @cached_property
    def is_activation(self) -> bool:
        """True for an activation, False for a gradient."""
        return self.action.kind is Kind.FORWARD

    @cached_property
    def label(self) -> str:
        """Its name in messages to users."""
        word = "activation" if self.is_activation else "gradient"
        return f"{word} of {self.action} from pipeline rank {self.source} to {self.target}"


class ActionMessages(NamedTuple):
    """An action with its messages."""

    action: Action
    receives: tuple[ChunkTransfer, ...]
    """The messages to receive before the action, in the order of the sender: those that the action needs, and
    earlier ones of the same sender that nobody has received."""
    sends: tuple[ChunkTransfer, ...]
    """The messages to send after it."""


_OF_A_BACKWARD = ((Kind.FORWARD, 0), (Kind.RECOMPUTE, 0), *((kind, 1) for kind in BEGIN_BACKWARD))
_NEEDED: dict[Kind, tuple[tuple[Kind, int], ...]] = {
    Kind.FORWARD: ((Kind.FORWARD, -1),),
    Kind.RECOMPUTE: ((Kind.FORWARD, 0),),
    Kind.WEIGHT_GRADIENT: ((Kind.INPUT_GRADIENT, 0),),
    Kind.BACKWARD: _OF_A_BACKWARD,
    Kind.INPUT_GRADIENT: _OF_A_BACKWARD,
}
"""The actions of its micro-batch that an action needs, if they are listed: kind, and chunks after its own."""


AHEAD = 2
"""The receives of later actions that are posted: more would only hold memory."""


def plan_posts(steps: Sequence[ActionMessages]) -> Iterator[list[ChunkTransfer]]:
    """Yield for each action of a rank the receives to post before it: its own, and some of later actions."""
    left = deque((number, message) for number, step in enumerate(steps) for message in step.receives)
    early = list[int]()
    for number in range(len(steps)):
        early, posts = [user for user in early if user > number], list[ChunkTransfer]()
        while left and (left[0][0] <= number or len(early) < AHEAD):  # in the order of the senders
            user, message = left.popleft()
            early += [user] * (user > number)
            posts.append(message)
        yield posts


# --------------------------------------------------------------------------- the actions of the sharding


def with_sharding(schedule: Schedule) -> Schedule:
    """Return a schedule that unshards each chunk before its first action, and reshards it after its last one.

    Args:
        schedule: compute actions alone.
    """
    lists = []
    for actions in schedule.lists:
        first, last = ({action.chunk: action for action in order} for order in (actions[::-1], actions))
        own = list[Action]()
        for action in actions:
            if action == first[action.chunk]:
                own.append(Action(Kind.UNSHARD, action.chunk, None))
            own.append(action)
            if action == last[action.chunk]:
                own.append(Action(Kind.RESHARD, action.chunk, None))
        lists.append(own)
    return schedule.with_lists(lists)


def without_steps(schedule: Schedule) -> Schedule:
    """Return a synchronous schedule without its steps, which end the batch.

    Raises:
        ValueError: a step comes before other work of its rank.
    """
    for rank, actions in enumerate(schedule.lists):
        for index, action in enumerate(actions):
            later = [one for one in actions[index:] if one.is_compute or one.kind is Kind.REDUCE]
            if action.kind is Kind.STEP and later:
                raise ValueError(
                    f"pipeline rank {rank}: expected steps after all computations and reduces of the list, "
                    f"got {action} before {later[0]}; a list with a step in the middle is asynchronous, and "
                    "needs pipeline.weights"
                )
    return schedule.with_lists([a for a in actions if a.kind is not Kind.STEP] for actions in schedule.lists)


def backwards_by_step(actions: Sequence[Action]) -> list[list[Action]]:
    """Return the ends of backwards before each step of a list, and those after the last step."""
    groups: list[list[Action]] = [[]]
    for action in actions:
        if action.kind is Kind.STEP:
            groups.append([])
        elif action.kind in END_BACKWARD:
            groups[-1].append(action)
    return groups


def ends_of_chunks(actions: Sequence[Action]) -> set[Action]:
    """Return the last backward of each chunk before each step, or before the end of the list."""
    last = ({action.chunk: action for action in group} for group in backwards_by_step(actions))
    return {action for of_chunks in last for action in of_chunks.values()}


def ends_of_steps(actions: Sequence[Action]) -> dict[Action, int]:
    """Return the last backward before each step, or before the end, with the number of its backwards.

    Args:
        actions: the list of a pipeline rank, with steps of all of its chunks or without any.
    """
    return {group[-1]: len(group) for group in backwards_by_step(actions) if group}
