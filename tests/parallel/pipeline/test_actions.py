"""Actions and schedules as data, and their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from torch.distributed.pipelining.schedules import _Action

from tests.parallel.pipeline.random_schedules import schedules
from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule, parse_action, parse_schedule

TWO = """
0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1
"""


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (Kind.RECOMPUTE, Kind.STEP)])
@pytest.mark.parametrize("microbatch", [0, 12])
def test_the_text_of_an_action_is_read_by_torch_as_the_same_action(kind: Kind, microbatch: int) -> None:
    theirs = _Action.from_str(str(Action(kind, 3, microbatch)))
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == (
        3,
        kind.value,
        microbatch,
    )


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", Action(Kind.FORWARD, 0, 3)),
        (" 12R0 ", Action(Kind.RECOMPUTE, 12, 0)),
        ("1UNSHARD", Action(Kind.UNSHARD, 1, None)),
        ("1RESHARD2", Action(Kind.RESHARD, 1, 2)),
        ("0REDUCE_GRAD", Action(Kind.REDUCE, 0, None)),
        ("STEP", Action(Kind.STEP, None, None)),
        ("2STEP7", Action(Kind.STEP, 2, 7)),
    ],
)
def test_an_action_is_read_back(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text.strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected an action as chunk, kind and micro-batch, such as 0F3, got ''"),
        ("F3", "such as 0F3, got 'F3'"),
        ("0F", "such as 0F3, got '0F'"),
        ("UNSHARD", "such as 0F3, got 'UNSHARD'"),
        ("0f1", "such as 0F3, got '0f1'"),
        ("0X1", "got '0X1': kinds are F, B, I, W, R, UNSHARD, RESHARD, REDUCE_GRAD, STEP; sends"),
        (
            "0SEND_F1",
            "got '0SEND_F1': kinds are F, B, I, W, R, UNSHARD, RESHARD, REDUCE_GRAD, STEP; sends and",
        ),
    ],
)
def test_another_text_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        parse_action(text)
    assert expected in str(error.value)


@given(schedules())
def test_a_schedule_is_read_back_from_its_text(schedule: Schedule) -> None:
    assert parse_schedule(str(schedule)) == schedule


def test_a_list_of_a_user_may_have_empty_cells_and_lines() -> None:
    assert parse_schedule("0F0, 0F1,,,0B0,,0B1\n\n,1F0,1B0,1F1,1B1\n,,\n") == parse_schedule(TWO)
    schedule = parse_schedule(TWO)
    assert (schedule.placement, schedule.num_microbatches, schedule.chunks) == ((0, 1), 2, ((0,), (1,)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a line of actions for each pipeline rank, got none"),
        ("0F0,0B0\n0F1,0B1", "expected chunk 0 on one rank, got ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0", "expected forwards of the chunks 0 to N - 1, got forwards of [0, 2]"),
        ("0F0,0B0\n1F0,1B", "pipeline rank 1: expected an action as chunk, kind and micro-batch"),
        ("0F0,0B0,1B0", "pipeline rank 0: expected a chunk below 1, got 1B0"),
        ("0F0,0B0,0UNSHARD1", "pipeline rank 0: expected a micro-batch below 1, got 0UNSHARD1"),
    ],
)
def test_lists_that_are_no_schedule_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        parse_schedule(text)
    assert expected in str(error.value)


def test_a_schedule_needs_a_chunk_on_each_rank_and_a_microbatch() -> None:
    with pytest.raises(ValueError, match=r"a chunk on each of 2 pipeline ranks, got \(0, 0\)"):
        Schedule((0, 0), 1, ((), ()))
    with pytest.raises(ValueError, match="expected at least 1 micro-batch, got 0"):
        Schedule((0,), 0, ((),))
