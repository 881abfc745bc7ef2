"""Activations in flight, counted from lists."""

from __future__ import annotations

from hypothesis import given

from tests.parallel.pipeline.random_schedules import schedules
from zeroshard.parallel.pipeline.actions import Kind, Schedule
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.simulate import count_activations


@given(schedules())
def test_activations_in_flight_are_those_between_forward_and_the_end_of_backward(schedule: Schedule) -> None:
    """Against a count at every place of the list, for chunks whose backward has one form."""
    held = count_activations(schedule)
    recomputed = {action[1:] for _, action in schedule if action.kind is Kind.RECOMPUTE}
    for rank, own in enumerate(schedule.lists):
        most = 0
        for place in range(len(own)):
            past = own[: place + 1]
            begun = {a[1:] for a in past if a.kind is Kind.RECOMPUTE} | {
                a[1:] for a in past if a.kind is Kind.FORWARD and a[1:] not in recomputed
            }
            ended = {a[1:] for a in past if a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)}
            most = max(most, len(begun - ended))
        assert held.per_rank[rank] == most


def test_the_chunks_of_a_rank_count_with_their_weights() -> None:
    schedule = build_schedule("interleaved", 2, 4)
    assert str(schedule).startswith("0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,")
    assert count_activations(schedule).per_rank == (5, 3)  # rank 0: after 0F2
    assert count_activations(schedule, (1, 1, 0, 0)).per_rank == (4, 3)  # rank 0: after 0F3
    assert count_activations(schedule, (0, 0, 10, 10)).per_rank == (20, 10)  # rank 0: after 2F1
