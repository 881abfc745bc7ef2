"""Activations in flight and versions of weights, counted from lists."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.parallel.pipeline.random_schedules import schedules
from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule, parse_action, parse_schedule
from zeroshard.parallel.pipeline.held import count_activations, count_versions
from zeroshard.parallel.pipeline.schedules import SCHEDULES, build_schedule

STEP = Action(Kind.STEP, None, None)


def pipedream(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with a step directly behind each backward."""
    schedule = build_schedule("1f1b", num_ranks, num_microbatches)
    lists = tuple(
        tuple(
            each for action in own for each in ((action, STEP) if action.kind is Kind.BACKWARD else (action,))
        )
        for own in schedule.lists
    )
    return Schedule(schedule.placement, num_microbatches, lists)


def test_a_delay_of_pipedream_is_the_distance_to_the_last_rank() -> None:
    """Narayanan et al. 2019, section 3.3: rank r of p keeps p - r versions."""
    versions = count_versions(pipedream(4, 12))
    assert versions.per_rank == (4, 3, 2, 1)
    for action, delay in versions.delays.items():
        distance = 3 - action.chunk
        assert delay == min(distance, action.microbatch)  # the first micro-batches began before any step


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_synchronous_schedule_has_one_version(name: str) -> None:
    schedule = build_schedule(name, 3, 6)
    lists = tuple((*own, STEP) for own in schedule.lists)
    versions = count_versions(Schedule(schedule.placement, 6, lists))
    assert versions.per_rank == (1, 1, 1)
    assert set(versions.delays.values()) == {0}


def test_a_step_of_one_chunk_counts_for_that_chunk_alone() -> None:
    versions = count_versions(parse_schedule("0F0,1F0,1STEP,1B0,0B0,0STEP,1STEP"))
    assert versions.delays == {parse_action("1B0"): 1, parse_action("0B0"): 0}
    assert versions.per_rank == (2,)


def test_the_halves_and_the_recompute_of_a_backward_have_delays_of_their_own() -> None:
    versions = count_versions(parse_schedule("0F0,STEP,0R0,STEP,0I0,STEP,0W0,STEP"))
    assert {str(action): delay for action, delay in versions.delays.items()} == {"0R0": 1, "0I0": 2, "0W0": 3}


def test_a_backward_before_its_forward_has_no_version() -> None:
    with pytest.raises(ValueError, match="expected 0B0 behind the forward of its micro-batch"):
        count_versions(parse_schedule("0B0,0F0"))


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
        assert max(held.per_chunk[chunk] for chunk in schedule.chunks[rank]) <= most


def test_a_chunk_of_an_interleaved_rank_is_counted_by_itself() -> None:
    schedule = build_schedule("interleaved", 2, 4)
    assert str(schedule).startswith("0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,")
    held = count_activations(schedule)
    assert held.per_rank == (5, 3)  # rank 0: after 0F2
    assert held.per_chunk == (4, 3, 2, 1)  # chunk 0: after 0F3; chunk 2: after 2F1
