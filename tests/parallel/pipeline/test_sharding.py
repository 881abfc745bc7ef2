"""The actions of the sharding in a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.parallel.pipeline.random_schedules import schedules
from zeroshard.parallel.pipeline.actions import (
    END_BACKWARD,
    Action,
    Kind,
    Schedule,
    parse_schedule,
    reduced_apart,
    with_sharding,
    without_steps,
)
from zeroshard.parallel.pipeline.simulate import simulate

TWO = parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")


def test_a_chunk_is_unsharded_once_a_batch() -> None:
    assert str(with_sharding(TWO)) == (
        "0UNSHARD,0F0,0F1,0B0,0B1,0RESHARD,0REDUCE_GRAD,STEP\n"
        "1UNSHARD,1F0,1B0,1F1,1B1,1RESHARD,1REDUCE_GRAD,STEP\n"
    )


@given(schedules())
def test_the_compute_stays_and_each_chunk_is_reduced_once_behind_its_last_backward(
    schedule: Schedule,
) -> None:
    sharded = with_sharding(schedule)
    assert simulate(sharded).makespan == simulate(schedule).makespan
    for rank, own in enumerate(sharded.lists):
        assert tuple(action for action in own if action.is_compute) == schedule.lists[rank]
        assert [action.kind for action in own].count(Kind.STEP) == 1
        assert own[-1].kind is Kind.STEP
        for chunk in schedule.chunks[rank]:
            kinds = [action.kind for action in own if action.chunk == chunk]
            assert kinds.count(Kind.REDUCE) == 1
            assert kinds.count(Kind.UNSHARD) == kinds.count(Kind.RESHARD) == 1
            last = max(index for index, kind in enumerate(kinds) if kind in END_BACKWARD)
            assert kinds[last + 1 :] == [Kind.RESHARD, Kind.REDUCE]


@given(schedules())
def test_the_steps_that_were_added_are_those_of_the_batch(schedule: Schedule) -> None:
    sharded = with_sharding(schedule)
    flushed = without_steps(sharded)
    assert [(*own, Action(Kind.STEP, None, None)) for own in flushed.lists] == list(sharded.lists)
    assert without_steps(flushed) == flushed


@given(schedules())
def test_the_reduces_that_were_added_follow_the_last_backward_at_once(schedule: Schedule) -> None:
    assert not any(map(reduced_apart, with_sharding(schedule).lists))


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("0F0,1F0,1B0,0B0", []),
        ("0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD", []),
        ("0F0,1F0,1B0,1RESHARD,1REDUCE_GRAD,0B0", []),
        ("0F0,1F0,1B0,0B0,1REDUCE_GRAD,0REDUCE_GRAD", [1]),
        ("0F0,1F0,1B0,0I0,1REDUCE_GRAD,0W0", [1]),
        ("0F0,1F0,1B0,0F1,1F1,1REDUCE_GRAD,1B1,0B0,0B1", []),  # no gradient may follow the reduce that counts
        ("0F0,1F0,1B0,0F1,1F1,1REDUCE_GRAD,1B1,0B0,0B1,1REDUCE_GRAD", [1]),
    ],
)
def test_a_chunk_is_reduced_apart_if_others_compute_before_its_last_reduce(
    text: str, chunks: list[int]
) -> None:
    assert sorted(reduced_apart(parse_schedule(text).lists[0])) == chunks
