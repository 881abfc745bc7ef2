"""Schedules of a pipeline as data: the actions of each pipeline rank, in order, and their text.

A *chunk* is a contiguous run of the model's layers. Chunks are numbered over all ranks from 0, in the order
of the model. A *pipeline rank* is the place of a rank on the axis pp. The *placement* names the pipeline
rank of each chunk. An action is written as chunk, kind, micro-batch, so `0F3` is the forward of chunk 0 for
micro-batch 3:

    rank 0    0F0 0F1 0F2     0B0     0B1     0B2
    rank 1        1F0 1B0 1F1 1B1 1F2 1B2

    text      0F0,0F1,0F2,0B0,0B1,0B2        a line for each rank; a comma between two actions;
              1F0,1B0,1F1,1B1,1F2,1B2        an empty cell has no meaning

Source: the notation is that of the CSV files of torch.distributed.pipelining. `R` and `STEP` are additions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
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


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE)
"""The kinds that compute one micro-batch in one chunk."""

BEGIN_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""The kinds that give the gradient of a chunk's input."""

END_BACKWARD = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
"""The kinds after which nobody needs the activations of a micro-batch."""

_TEXT = re.compile(r"(\d*)([A-Z_]+)(\d*)")
_TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_FORM = "chunk, kind and micro-batch, such as 0F3"


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


def parse_action(text: str) -> Action:
    """Return the action that a text such as `0F3`, `1UNSHARD` or `STEP` names.

    Raises:
        ValueError: the text has another form, or lacks a number that its kind needs.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected an action as {_FORM}, got {text!r}")
    chunk, word, microbatch = match.groups()
    if word in _TRANSFERS:
        raise ValueError(f"expected a list without sends and receives, which follow from it, got {text!r}")
    known = {kind.value: kind for kind in Kind}
    if word not in known:
        raise ValueError(f"expected a kind of action among {', '.join(known)}, got {text!r}")
    kind = known[word]
    if (not chunk and kind is not Kind.STEP) or (not microbatch and kind in COMPUTE):
        raise ValueError(f"expected an action as {_FORM}, got {text!r}")
    return Action(kind, int(chunk) if chunk else None, int(microbatch) if microbatch else None)


@dataclass(frozen=True)
class Schedule:
    """The actions of all pipeline ranks for one batch.

    Args:
        placement: the pipeline rank of each chunk.
        num_microbatches: the micro-batches of the batch.
        lists: the actions of each pipeline rank, in the order in which it runs them.

    Raises:
        ValueError: there is no such rank, chunk or micro-batch. `check.py` and `simulate.py` check the rest.
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
            if action.chunk is not None and action.chunk >= self.num_chunks:
                raise ValueError(
                    f"pipeline rank {rank}: expected a chunk below {self.num_chunks}, got {action}"
                )
            if action.microbatch is not None and action.microbatch >= self.num_microbatches:
                most = self.num_microbatches
                raise ValueError(f"pipeline rank {rank}: expected a micro-batch below {most}, got {action}")

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
        own = [[action for action in actions if action.kind is Kind.FORWARD] for actions in self.lists]
        return Schedule(self.placement, self.num_microbatches, frozen(own))

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each pipeline rank."""
        return tuple(
            tuple(chunk for chunk, place in enumerate(self.placement) if place == rank)
            for rank in range(self.num_ranks)
        )


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
        for chunk in {action.chunk for action in actions if action.kind is Kind.FORWARD}:
            assert chunk is not None
            if (other := places.setdefault(chunk, rank)) != rank:
                raise ValueError(f"expected chunk {chunk} on one rank, got ranks {other} and {rank}")
    if sorted(places) != list(range(len(places))):
        raise ValueError(f"expected forwards of the chunks 0 to N - 1, got those of {sorted(places)}")
    placement = tuple(places[chunk] for chunk in range(len(places)))
    microbatches = [action.microbatch for action in compute if action.microbatch is not None]
    return Schedule(placement, max(microbatches) + 1, lists)


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


def split_backward(chunk: int, microbatch: int) -> tuple[Action, Action]:
    """Return the two halves of a backward: the gradient of the input, then that of the weights."""
    return Action(Kind.INPUT_GRADIENT, chunk, microbatch), Action(Kind.WEIGHT_GRADIENT, chunk, microbatch)


def loop(num_ranks: int, chunks_per_rank: int) -> tuple[int, ...]:
    """Return the placement that deals chunks out to the ranks in turn: 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * chunks_per_rank


def frozen(lists: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return lists of actions as a schedule holds them."""
    return tuple(tuple(actions) for actions in lists)
