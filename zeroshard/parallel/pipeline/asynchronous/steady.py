"""The steady schedule of an asynchronous pipeline: 1F1B that never drains, with a step after some backwards.

    rank 0    0F0 0F1 0B0 STEP 0F2 0B1 STEP 0F3 0B2 STEP 0B3 STEP
    rank 1        1F0 1B0 STEP 1F1 1B1 STEP 1F2 1B2 STEP 1F3 1B3 STEP

A synchronous pipeline drains before each step. This one fills once, at the beginning of the list, and drains
once, at its end. So each rank takes its steps by itself, while micro-batches are under way on the others.

The first steps may be synchronous, since weights change fast at first and delays then harm most (Yang et al.
2021, "PipeMare", section 3.3, technique 3).

Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from zeroshard.parallel.pipeline.actions import END_BACKWARD, Action, Kind, Schedule, frozen, loop
from zeroshard.parallel.pipeline.alternating import one_f_one_b

_STEP = Action(Kind.STEP, None, None)
_KINDS = (Kind.FORWARD, Kind.BACKWARD)
"""The kinds of compute actions of an asynchronous list."""


def steady(
    num_ranks: int, num_microbatches: int, microbatches_per_step: int = 1, num_synchronous: int = 0
) -> Schedule:
    """Return 1F1B without a flush between steps.

    Args:
        num_ranks: pipeline ranks.
        num_microbatches: all micro-batches of the list. The last step takes those that are left over.
        microbatches_per_step: backwards of a rank before each of its steps.
        num_synchronous: the first steps, each of which begins when the one before has ended on all ranks.
    """
    flushed = min(num_synchronous * microbatches_per_step, num_microbatches)
    starts = [*range(0, flushed, microbatches_per_step), flushed, num_microbatches]
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    for start, end in pairwise(starts):
        if start < end:
            for own, actions in zip(lists, one_f_one_b(num_ranks, end - start).lists, strict=True):
                own.extend(_with_steps(actions, start, microbatches_per_step))
    return Schedule(loop(num_ranks, 1), num_microbatches, frozen(lists))


def _with_steps(actions: tuple[Action, ...], start: int, per_step: int) -> Iterator[Action]:
    """The actions, whose micro-batches are counted from `start`, with a step after some backwards."""
    num_backwards, since = sum(action.kind in END_BACKWARD for action in actions), 0
    for action in actions:
        assert action.microbatch is not None, "only compute actions"
        yield action._replace(microbatch=start + action.microbatch)
        if action.kind in END_BACKWARD:
            num_backwards, since = num_backwards - 1, since + 1
            if since == per_step or not num_backwards:
                yield _STEP
                since = 0


def require_steps(schedule: Schedule) -> None:
    """Check that an asynchronous pipeline can train with a list of the user's.

    Raises:
        ValueError: a rank has several chunks, or actions beside compute and steps; or gradients are left that
            no step applies, or a step that applies none; or ranks take different numbers of steps.
    """
    numbers = []
    for rank, actions in enumerate(schedule.lists):
        where = f"pipeline rank {rank}"
        if len(schedule.chunks[rank]) != 1:
            got = ", ".join(map(str, schedule.chunks[rank]))
            raise ValueError(f"{where}: expected one chunk in an asynchronous list, got {got}")
        since = number = 0
        for action in actions:
            if action.kind is Kind.STEP:
                if not since:
                    raise ValueError(f"{where}: expected a backward before each step, got none")
                since, number = 0, number + 1
            elif action.kind not in _KINDS:
                kinds = ", ".join(kind.value for kind in _KINDS)
                raise ValueError(f"{where}: expected {kinds} and STEP in an asynchronous list, got {action}")
            since += action.kind in END_BACKWARD
        if since:
            raise ValueError(f"{where}: expected a STEP behind the last backward of the list, got none")
        numbers.append(number)
    if len(set(numbers)) > 1:  # else schedules of the learning rate, and `global_step`, would differ
        got = ", ".join(map(str, numbers))
        raise ValueError(
            f"expected the same number of steps in all lists of an asynchronous pipeline, got {got}"
        )
