"""The simulator: times, deadlocks, and lists that are refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.pipeline.random_schedules import schedules
from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule, parse_schedule
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.simulate import (
    ActionCosts,
    ChunkBytes,
    count_activations,
    count_bytes,
    simulate,
)

TWO = """
0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1
"""


# ---------------------------------------------------------------------------------------- times


@given(
    schedules(),
    st.builds(
        ActionCosts,
        forward=st.integers(0, 5),
        backward_input=st.integers(0, 5),
        backward_weight=st.integers(0, 5),
        recompute=st.integers(0, 5),
        transfer=st.integers(0, 5),
    ),
)
def test_each_action_starts_as_soon_as_its_rank_and_what_it_needs_allow(
    schedule: Schedule, costs: ActionCosts
) -> None:
    """Against the longest path through the graph of actions, found without lists of messages."""
    timeline = simulate(schedule, costs)
    spans = {span.action: span for own in timeline.spans for span in own}
    needed = schedule.needed
    for rank, own in enumerate(timeline.spans):
        assert tuple(span.action for span in own) == schedule.lists[rank]
        for index, span in enumerate(own):
            assert span.end - span.start == costs.of(span.action)
            arrivals = [own[index - 1].end if index else 0.0]
            for action in needed[span.action]:
                is_here = schedule.placement[action.chunk] == rank
                arrivals.append(spans[action].end + (0 if is_here else costs.transfer))
            # With one duration for all transfers none overtakes another, so the order adds no wait.
            assert span.start == max(arrivals)
    assert timeline.makespan == max(span.end for span in spans.values())
    assert sum(timeline.busy) == sum(costs.of(action) for action in spans)


class PerChunk(ActionCosts):
    """Costs whose durations count for chunk 0; those of later chunks are multiples."""

    def of(self, action: Action) -> float:
        return super().of(action) * (1 + 2 * (action.chunk or 0))


def test_transfers_steps_and_durations_of_each_chunk_count() -> None:
    schedule = parse_schedule("0F0,0B0,STEP\n1F0,1B0,STEP")
    spans = simulate(schedule, PerChunk(transfer=0.5, step=10)).spans
    assert [(span.start, span.end) for span in spans[0]] == [(0, 1), (11, 13), (13, 23)]
    assert [(span.start, span.end) for span in spans[1]] == [(1.5, 4.5), (4.5, 10.5), (10.5, 20.5)]


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_an_impossible_duration_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match=f"transfer: expected a duration of at least 0, got {number}"):
        ActionCosts(transfer=number)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0F1,", "", "expected F, B or F, I, W of chunk 0 and micro-batch 1, each once, got 0B1"),
        ("0F1", "0F1,0F1", ", each once, got 0F1, 0F1, 0B1"),
        ("0B1", "0B0", ", each once, got 0F0, 0B0, 0B0"),
        (",0B1", "", ", each once, got 0F1"),
        ("0B1", "0W1", ", each once, got 0F1, 0W1"),
        ("1B0", "1I0", ", each once, got 1F0, 1I0"),
        ("0B1", "0B1,0I1,0W1", ", each once, got 0F1, 0B1, 0I1, 0W1"),
        ("0B1", "0R1,0R1,0B1", ", each once, got 0F1, 0B1, 0R1, 0R1"),
        ("1F1,", "1F1,0B1,", "expected 0B1 on pipeline rank 0, got it on 1"),
    ],
)
def test_a_list_with_missing_double_or_misplaced_actions_is_refused(
    old: str, new: str, expected: str
) -> None:
    assert old in TWO
    with pytest.raises(ValueError, match=re.escape(expected)):
        simulate(parse_schedule(TWO.replace(old, new)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "got a deadlock: pipeline rank 0: 0B0 waits for 1B0; pipeline rank 1: 1F1 waits for 0F1",
        ),
        (
            "0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1",
            "got a deadlock: pipeline rank 1: 1B0 waits for 1F0, which comes later in its own list",
        ),
        (
            "0F0,0W0,0I0\n1F0,1I0,1W0",
            "got a deadlock: pipeline rank 0: 0W0 waits for 0I0, which comes later in its own list",
        ),
        ("0F0,0B0,0R0\n1F0,1B0", "pipeline rank 0: 0B0 waits for 0R0, which comes later in its own list"),
    ],
)
def test_a_deadlock_is_refused_with_the_actions_that_wait_for_each_other(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        simulate(parse_schedule(text))


# ---------------------------------------------------------------------------------------- bounded buffers


def test_1f1b_needs_one_buffer_because_neighbours_send_to_each_other_at_once() -> None:
    """Rank 0 sends the second activation while rank 1 sends the first gradient: neither receives."""
    schedule = build_schedule("1f1b", 2, 2)
    text = (
        "pipeline rank 0: the send of the activation of 0F1 from pipeline rank 0 to 1 waits for a receive, "
        "at most 0 unreceived; pipeline rank 1: the send of the gradient of 1B0 from pipeline rank 1 to 0"
    )
    with pytest.raises(ValueError, match=text):
        simulate(schedule, max_unreceived=0)
    assert simulate(schedule, max_unreceived=1).makespan == 9


# -------------------------------------------------------------------------------------- activations in flight


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


def of_kept(*kept: int) -> list[ChunkBytes]:
    return [ChunkBytes(0, one, one, 0) for one in kept]


def test_the_bytes_of_a_rank_are_those_of_its_chunks() -> None:
    schedule = build_schedule("interleaved", 2, 4)
    assert str(schedule).startswith("0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,")
    assert count_activations(schedule).per_rank == (5, 3)  # rank 0: after 0F2
    assert count_bytes(schedule, of_kept(1, 1, 0, 0)) == (4, 3)  # rank 0: after 0F3
    assert count_bytes(schedule, of_kept(0, 0, 10, 10)) == (20, 10)  # rank 0: after 2F1


def test_messages_count_from_their_post_to_the_backward_that_needs_them() -> None:
    schedule = build_schedule("1f1b", 2, 8)
    # Rank 0: activations of two micro-batches, and three gradients: one is here, two are ahead. Rank 1: the
    # input that it has and two ahead, the gradient of the input before, and what is kept.
    assert count_bytes(schedule, [ChunkBytes(1, 10, 10, 0), ChunkBytes(0, 100, 100, 0)]) == (23, 104)


def test_what_a_backward_computes_again_is_there_beside_other_micro_batches() -> None:
    schedule = build_schedule("gpipe", 2, 4)
    assert count_bytes(schedule, [ChunkBytes(0, 10, 15, 0), ChunkBytes(0, 1, 1, 0)]) == (45, 4)


def test_operands_of_weight_gradients_wait_for_the_second_half() -> None:
    schedule = parse_schedule("0F0,0I0,0F1,0I1,0W0,0W1")
    assert count_bytes(schedule, [ChunkBytes(0, 10, 10, 3)]) == (13,)


def test_a_chunk_that_recomputes_keeps_its_input_alone() -> None:
    schedule = parse_schedule("0F0,0F1,0R0,0B0,0R1,0B1")
    assert count_bytes(schedule, of_kept(10)) == (10,)
