"""The actions of the sharding, added to a schedule of compute actions.

    once a batch        0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD STEP
    once a micro-batch  0UNSHARD0 0F0 0RESHARD0 0UNSHARD1 0F1 0RESHARD1 ... 0REDUCE_GRAD STEP

Once a batch moves the least bytes. Once a micro-batch holds the least: a chunk is whole only while a
micro-batch computes in it. An action that directly follows one of the same chunk and micro-batch, such as a
backward after its recompute, finds the chunk still unsharded. In both, gradients are reduced once a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

from zeroshard.parallel.pipeline.actions import END_BACKWARD, Action, Kind, Schedule, frozen

Unshard = Literal["batch", "microbatch"]
_STEP = Action(Kind.STEP, None, None)


def with_sharding(schedule: Schedule, unshard: Unshard = "batch") -> Schedule:
    """Return a synchronous schedule with unshard, reshard, reduce and a step at the end of each rank.

    Args:
        schedule: compute actions alone.
        unshard: "batch": each chunk is unsharded once for the batch. "microbatch": for each micro-batch.

    Raises:
        ValueError: the schedule has other actions, or there is no such word for `unshard`.
    """
    if unshard not in ("batch", "microbatch"):
        raise ValueError(f"unshard: expected 'batch' or 'microbatch', got {unshard!r}")
    for rank, action in schedule:
        if not action.is_compute:
            raise ValueError(f"pipeline rank {rank}: expected compute actions alone, got {action}")
    lists = []
    for actions in schedule.lists:
        spans = _whole_batch(actions) if unshard == "batch" else _microbatches(actions)
        lists.append([*_reduced(list(spans)), _STEP])
    return Schedule(schedule.placement, schedule.num_microbatches, frozen(lists))


def without_steps(schedule: Schedule) -> Schedule:
    """Return a synchronous schedule without its steps, which end the batch.

    Raises:
        ValueError: a step comes before other work of its rank; or chunks have different numbers of steps.
    """
    if all(action.kind is not Kind.STEP for _, action in schedule):
        return schedule
    for rank, actions in enumerate(schedule.lists):
        for index, action in enumerate(actions):
            later = [one for one in actions[index:] if one.is_compute or one.kind is Kind.REDUCE]
            if action.kind is Kind.STEP and later:
                raise ValueError(
                    f"pipeline rank {rank}: expected steps behind all computations and reduces of the list, "
                    f"got {action} before {later[0]}; a list with a step in the middle is asynchronous, and "
                    "needs pipeline.weights"
                )
        for chunk in schedule.chunks[rank]:
            steps = [one for one in actions if one.kind is Kind.STEP and one.chunk in (None, chunk)]
            if len(steps) != 1:
                got = ", ".join(map(str, steps)) or "none"
                raise ValueError(f"pipeline rank {rank}: expected one step of chunk {chunk}, got {got}")
    lists = [[action for action in actions if action.kind is not Kind.STEP] for actions in schedule.lists]
    return Schedule(schedule.placement, schedule.num_microbatches, frozen(lists))


def reduced_apart(actions: Sequence[Action]) -> frozenset[int]:
    """Return the chunks whose last reduce does not follow their last backward at once: others compute first.

    Args:
        actions: the list of a pipeline rank.
    """
    ends = {action.chunk: index for index, action in enumerate(actions) if action.kind in END_BACKWARD}
    reduces = {action.chunk: index for index, action in enumerate(actions) if action.kind is Kind.REDUCE}
    return frozenset(
        chunk
        for chunk, end in ends.items()
        if chunk is not None and any(action.is_compute for action in actions[end + 1 : reduces.get(chunk, 0)])
    )


def ends_of_chunks(actions: Sequence[Action]) -> set[Action]:
    """Return the last backward of each chunk before each step, or before the end of the list."""
    ends: set[Action] = set()
    last: dict[int | None, Action] = {}
    for action in (*actions, _STEP):
        if action.kind in END_BACKWARD:
            last[action.chunk] = action
        elif action.kind is Kind.STEP:
            ends.update(last.values())
            last = {}
    return ends


def ends_of_steps(actions: Sequence[Action]) -> dict[Action, int]:
    """Return the last backward before each step, or before the end, with the number of its backwards.

    Args:
        actions: the list of a pipeline rank, with steps of all of its chunks or without any.
    """
    found: dict[Action, int] = {}
    last, number = None, 0
    for action in (*actions, _STEP):
        if action.kind in END_BACKWARD:
            last, number = action, number + 1
        elif action.kind is Kind.STEP and last is not None:
            found[last] = number
            last, number = None, 0
    return found


def _whole_batch(actions: tuple[Action, ...]) -> Iterator[Action]:
    """Unshard each chunk before its first action, and reshard it after its last one."""
    last = {action.chunk: index for index, action in enumerate(actions)}
    seen: set[int | None] = set()
    for index, action in enumerate(actions):
        if action.chunk not in seen:
            yield Action(Kind.UNSHARD, action.chunk, None)
            seen.add(action.chunk)
        yield action
        if last[action.chunk] == index:
            yield Action(Kind.RESHARD, action.chunk, None)


def _microbatches(actions: tuple[Action, ...]) -> Iterator[Action]:
    """Unshard each chunk before, and reshard it after, each run of actions of one micro-batch."""
    for (chunk, microbatch), run in groupby(actions, key=lambda action: (action.chunk, action.microbatch)):
        yield Action(Kind.UNSHARD, chunk, microbatch)
        yield from run
        yield Action(Kind.RESHARD, chunk, microbatch)


def _reduced(actions: list[Action]) -> Iterator[Action]:
    """Reduce the gradients of each chunk after its last backward, and after the reshard that follows it."""
    ends = {action.chunk: index for index, action in enumerate(actions) if action.kind in END_BACKWARD}
    for index, action in enumerate(actions):
        yield action
        if action.kind is Kind.RESHARD and index - 1 == ends.get(action.chunk):
            yield Action(Kind.REDUCE, action.chunk, None)
