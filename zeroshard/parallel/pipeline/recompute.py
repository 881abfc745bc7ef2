"""Recomputation as an addition to a schedule: a recompute goes directly before the backward that needs it."""

from __future__ import annotations

from itertools import pairwise

from zeroshard.parallel.pipeline.actions import BEGIN_BACKWARD, Action, Kind, Schedule, frozen


def with_recompute(schedule: Schedule) -> Schedule:
    """Return a schedule that recomputes the activations of each micro-batch before its backward.

    A backward directly after its forward finds the activations still there and needs no recompute: that of
    the last rank in 1F1B, and the first one of a GPipe that goes back from the last micro-batch. A recompute
    does not need the gradient, so a rank runs it while the gradient is on its way.

    Raises:
        ValueError: the schedule has recomputes.
    """
    if any(action.kind is Kind.RECOMPUTE for _, action in schedule):
        raise ValueError("expected a schedule without recomputes, got one that has them")
    lists = [_recomputing(actions) for actions in schedule.lists]
    return Schedule(schedule.placement, schedule.num_microbatches, frozen(lists))


def _recomputing(actions: tuple[Action, ...]) -> list[Action]:
    found = list(actions[:1])
    for before, action in pairwise(actions):
        is_direct = before == action._replace(kind=Kind.FORWARD)
        if action.kind in BEGIN_BACKWARD and not is_direct:
            found.append(action._replace(kind=Kind.RECOMPUTE))
        found.append(action)
    return found
