"""The activations that each pipeline rank holds, counted from the lists alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.parallel.pipeline.actions import END_BACKWARD, Kind, Schedule
from zeroshard.parallel.pipeline.check import check_actions


@dataclass(frozen=True)
class Held:
    """The largest numbers of micro-batches whose activations are held at a time.

    Args:
        per_chunk: for each chunk, from its forward, or its recompute if it has one, to the end of its
            backward.
        per_rank: for each pipeline rank, over all of its chunks together.
        inputs_per_chunk: for each chunk, micro-batches of which only the input is held, for a recompute.
        inputs_per_rank: the same for each pipeline rank.
    """

    per_chunk: tuple[int, ...]
    per_rank: tuple[int, ...]
    inputs_per_chunk: tuple[int, ...]
    inputs_per_rank: tuple[int, ...]


class _Peaks:
    """Counts by key, with the largest value that each had."""

    def __init__(self) -> None:
        self.now: Counter[tuple[str, int]] = Counter()
        self.peak: Counter[tuple[str, int]] = Counter()

    def add(self, rank: int, chunk: int, number: int) -> None:
        for key in (("rank", rank), ("chunk", chunk)):
            self.now[key] += number
            self.peak[key] = max(self.peak[key], self.now[key])

    def of(self, name: str, count: int) -> tuple[int, ...]:
        return tuple(self.peak[name, index] for index in range(count))


def count_activations(schedule: Schedule) -> Held:
    """Count the activations in flight. Raises ValueError as `check_actions` does."""
    check_actions(schedule)
    recomputed = {
        (action.chunk, action.microbatch) for _, action in schedule if action.kind is Kind.RECOMPUTE
    }
    whole, inputs = _Peaks(), _Peaks()
    for rank, action in schedule:
        if action.chunk is None or not action.is_compute:
            continue
        is_recomputed = (action.chunk, action.microbatch) in recomputed
        if action.kind is Kind.FORWARD:
            (inputs if is_recomputed else whole).add(rank, action.chunk, 1)
        elif action.kind is Kind.RECOMPUTE:
            inputs.add(rank, action.chunk, -1)
            whole.add(rank, action.chunk, 1)
        elif action.kind in END_BACKWARD:
            whole.add(rank, action.chunk, -1)
    chunks, ranks = schedule.num_chunks, schedule.num_ranks
    return Held(
        whole.of("chunk", chunks),
        whole.of("rank", ranks),
        inputs.of("chunk", chunks),
        inputs.of("rank", ranks),
    )


def most_bytes(schedule: Schedule, per_chunk: Sequence[int]) -> tuple[int, ...]:
    """Return for each pipeline rank the most bytes of activations that it holds at a time.

    Args:
        schedule: a schedule without recomputation of its own.
        per_chunk: the bytes of a micro-batch in each chunk, from its forward to the end of its backward.
    """
    now, most = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    for rank, action in schedule:
        if action.chunk is None:
            continue
        if action.kind is Kind.FORWARD:
            now[rank] += per_chunk[action.chunk]
            most[rank] = max(most[rank], now[rank])
        elif action.kind in END_BACKWARD:
            now[rank] -= per_chunk[action.chunk]
    return tuple(most)
