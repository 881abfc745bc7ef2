"""The activations and the versions of weights that each pipeline rank holds: counted from the lists alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.parallel.pipeline.actions import END_BACKWARD, Action, Kind, Schedule
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


@dataclass(frozen=True)
class Versions:
    """The versions of weights that a schedule needs.

    Args:
        per_rank: the versions that a pipeline rank holds of a chunk at a time, at most: those of the
            micro-batches in flight, and the newest one. It is 1 for a synchronous schedule.
        delays: for each recompute and backward, the steps of its chunk since the forward of its micro-batch.
    """

    per_rank: tuple[int, ...]
    delays: dict[Action, int]


def count_versions(schedule: Schedule) -> Versions:
    """Count the versions of weights.

    Several steps in a list make it asynchronous (PipeDream, Narayanan et al. 2019): a micro-batch whose
    forward is before a step and whose backward is behind it needs the weights from before the step.

    Raises:
        ValueError: see `check_actions`; a backward comes before its forward.
    """
    check_actions(schedule)
    delays: dict[Action, int] = {}
    per_rank = []
    for rank, actions in enumerate(schedule.lists):
        taken: Counter[int] = Counter()  # steps of each chunk so far
        used: dict[int, dict[int, int]] = {chunk: {} for chunk in schedule.chunks[rank]}  # by micro-batch
        most = 1
        for action in actions:
            kind, chunk, microbatch = action
            if kind is Kind.STEP:
                taken.update(tuple(used) if chunk is None else (chunk,))
            elif action.is_compute and chunk is not None and microbatch is not None:
                if kind is Kind.FORWARD:
                    used[chunk][microbatch] = taken[chunk]
                elif microbatch not in used[chunk]:
                    raise ValueError(f"expected {action} behind the forward of its micro-batch")
                else:
                    delays[action] = taken[chunk] - used[chunk][microbatch]
                if kind in END_BACKWARD:
                    del used[chunk][microbatch]
            if kind in (Kind.STEP, Kind.FORWARD):
                counts = (len({taken[each], *versions.values()}) for each, versions in used.items())
                most = max(most, *counts)
        per_rank.append(most)
    return Versions(tuple(per_rank), delays)
