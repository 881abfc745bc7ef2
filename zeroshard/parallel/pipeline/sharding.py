"""The actions of the sharding, added to a schedule of compute actions.

0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD STEP
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.parallel.pipeline.actions import END_BACKWARD, STEP, Action, Kind, Schedule


def with_sharding(schedule: Schedule) -> Schedule:
    """Return a synchronous schedule with unshard, reshard, reduce and a step at the end of each rank.

    Each chunk is unsharded before its first action, and resharded after its last one. Its gradients are
    reduced after that.

    Args:
        schedule: compute actions alone.

    Raises:
        ValueError: the schedule has other actions.
    """
    for rank, action in schedule:
        if not action.is_compute:
            raise ValueError(f"pipeline rank {rank}: expected compute actions alone, got {action}")
    lists = []
    for actions in schedule.lists:
        last, seen, own = {action.chunk: action for action in actions}, set[int | None](), list[Action]()
        for action in actions:
            if action.chunk not in seen:
                own.append(Action(Kind.UNSHARD, action.chunk, None))
                seen.add(action.chunk)
            own.append(action)
            if action == last[action.chunk]:
                own.append(Action(Kind.RESHARD, action.chunk, None))
                if action.kind in END_BACKWARD:
                    own.append(Action(Kind.REDUCE, action.chunk, None))
        lists.append([*own, STEP])
    return schedule.with_lists(lists)


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
            steps = [one for one in actions if one.is_step_of(chunk)]
            if len(steps) != 1:
                got = ", ".join(map(str, steps)) or "none"
                raise ValueError(f"pipeline rank {rank}: expected one step of chunk {chunk}, got {got}")
    return schedule.with_lists([a for a in actions if a.kind is not Kind.STEP] for actions in schedule.lists)


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
    for action in (*actions, STEP):
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
    for action in (*actions, STEP):
        if action.kind in END_BACKWARD:
            last, number = action, number + 1
        elif action.kind is Kind.STEP and last is not None:
            found[last] = number
            last, number = None, 0
    return found
