"""The checks of a schedule that need no simulation: each action is there, once, on the rank of its chunk.

`simulate.py` finds the lists in which the order is wrong, because ranks then wait for each other.
"""

from __future__ import annotations

from collections import Counter

from zeroshard.parallel.pipeline.actions import END_BACKWARD, Action, Kind, Schedule

_F, _B, _I, _W, _R = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.INPUT_GRADIENT,
    Kind.WEIGHT_GRADIENT,
    Kind.RECOMPUTE,
)


def check_actions(schedule: Schedule) -> None:
    """Check that every chunk has one forward and one backward for each micro-batch, on its own rank.

    A schedule of forwards alone is one for an evaluation.

    Raises:
        ValueError: an action is missing, is there twice, or is on another rank; a chunk computes while it is
            not unsharded; gradients are left that no reduce takes.
    """
    _check_places(schedule)
    counts = Counter(action for _, action in schedule if action.is_compute)
    is_evaluation = all(action.kind is Kind.FORWARD for action in counts)
    for chunk in range(schedule.num_chunks):
        for microbatch in range(schedule.num_microbatches):
            _check_microbatch(counts, chunk, microbatch, is_evaluation)
    for rank, actions in enumerate(schedule.lists):
        for chunk in schedule.chunks[rank]:
            _check_sharding(rank, [action for action in actions if action.chunk == chunk])


def _check_places(schedule: Schedule) -> None:
    for rank, action in schedule:
        if action.chunk is not None and schedule.placement[action.chunk] != rank:
            place = schedule.placement[action.chunk]
            raise ValueError(f"expected {action} on pipeline rank {place}, got it on {rank}")


def _check_microbatch(counts: Counter[Action], chunk: int, microbatch: int, is_evaluation: bool) -> None:
    num = {kind: counts[Action(kind, chunk, microbatch)] for kind in (_F, _B, _I, _W, _R)}
    for kind, count in num.items():
        if count > 1:
            raise ValueError(f"expected {Action(kind, chunk, microbatch)} once, got it {count} times")
    forward, backward, half, weight = (Action(kind, chunk, microbatch) for kind in (_F, _B, _I, _W))
    if not num[_F]:
        raise ValueError(f"expected {forward} in a list, got none")
    if num[_B] and (num[_I] or num[_W]):
        other = half if num[_I] else weight
        raise ValueError(f"expected a whole backward or its two halves, got {backward} and {other}")
    if not num[_B] and num[_I] != num[_W]:
        there, missing = (half, weight) if num[_I] else (weight, half)
        raise ValueError(f"expected {missing} with {there}, got none")
    if not is_evaluation and not num[_B] and not num[_I]:
        raise ValueError(f"expected {backward}, or {half} and {weight}, got none")


def _check_sharding(rank: int, actions: list[Action]) -> None:
    """Check the actions of one chunk, if its list has actions of the sharding at all."""
    kinds = [action.kind for action in actions]
    is_unsharded = False
    for action in actions if Kind.UNSHARD in kinds else ():
        if action.is_compute and not is_unsharded:
            raise ValueError(
                f"pipeline rank {rank}: expected {action.chunk}UNSHARD before {action}, got none"
            )
        if action.kind in (Kind.UNSHARD, Kind.RESHARD):
            is_unsharded = action.kind is Kind.UNSHARD
    if Kind.REDUCE in kinds:
        ends = [index for index, kind in enumerate(kinds) if kind in END_BACKWARD]
        if Kind.REDUCE not in kinds[ends[-1] :]:
            last = actions[ends[-1]]
            raise ValueError(f"pipeline rank {rank}: expected {last.chunk}REDUCE_GRAD after {last}, got none")
