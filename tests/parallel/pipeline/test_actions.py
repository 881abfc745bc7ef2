"""Actions and schedules as data, their text, and their transfers; actions of the sharding."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from hypothesis import given
from torch.distributed.pipelining.schedules import _Action

from tests.parallel.pipeline.random_schedules import schedules
from zeroshard.parallel.pipeline.actions import (
    AHEAD,
    Action,
    ChunkTransfer,
    Kind,
    Schedule,
    parse_action,
    parse_schedule,
    plan_posts,
    with_sharding,
)
from zeroshard.parallel.pipeline.simulate import simulate

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


KINDS = "kinds are F, B, I, W, R, UNSHARD, RESHARD, REDUCE_GRAD, STEP; sends and receives follow from these"


@pytest.mark.parametrize("text", ["", "F3", "0F", "UNSHARD", "0f1", "0X1", "0SEND_F1"])
def test_another_text_is_refused(text: str) -> None:
    message = f"expected an action as chunk, kind and micro-batch, such as 0F3, got {text!r}: {KINDS}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_action(text)


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
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse_schedule(text)


def test_a_schedule_needs_a_chunk_on_each_rank_and_a_microbatch() -> None:
    with pytest.raises(ValueError, match=r"a chunk on each of 2 pipeline ranks, got \(0, 0\)"):
        Schedule((0, 0), 1, ((), ()))
    with pytest.raises(ValueError, match="expected at least 1 micro-batch, got 0"):
        Schedule((0,), 0, ((),))


# ------------------------------------------------------------------------------- exchanges and sharding


@given(schedules())
def test_messages_of_two_ranks_have_one_order_and_an_action_receives_all_that_it_needs_before_it(
    schedule: Schedule,
) -> None:
    sent: dict[tuple[int, int], list[ChunkTransfer]] = defaultdict(list)
    received: dict[tuple[int, int], list[ChunkTransfer]] = defaultdict(list)
    for rank, exchanges in enumerate(schedule.exchanges):
        for transfer in (transfer for one in exchanges for transfer in (*one.receives, *one.sends)):
            assert rank in (transfer.source, transfer.target)
            (sent if rank == transfer.source else received)[transfer.source, transfer.target].append(transfer)
    assert sent == received
    needed = schedule.needed
    for rank, exchanges in enumerate(schedule.exchanges):
        assert tuple(each.action for each in exchanges) == schedule.lists[rank]
        there: set[ChunkTransfer] = set()
        for exchange in exchanges:
            there.update(exchange.receives)
            own = {action for action in needed[exchange.action] if schedule.placement[action.chunk] != rank}
            found = {transfer.action for transfer in there if transfer.user == exchange.action}
            assert found == own
            assert all(transfer.target == rank for transfer in exchange.receives)
            for transfer in exchange.sends:
                assert (transfer.action, transfer.source) == (exchange.action, rank)


def test_a_message_that_overtakes_in_the_receivers_list_waits_in_its_memory() -> None:
    schedule = parse_schedule("0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0")
    first = schedule.exchanges[1][0]
    assert str(first.action) == "1F1"
    assert [str(transfer.action) for transfer in first.receives] == ["0F0", "0F1"]


def test_a_chunk_is_unsharded_once_a_batch() -> None:
    assert str(with_sharding(parse_schedule(TWO))) == (
        "0UNSHARD,0F0,0F1,0B0,0B1,0RESHARD\n1UNSHARD,1F0,1B0,1F1,1B1,1RESHARD\n"
    )


@given(schedules())
def test_receives_are_posted_in_order_and_few_of_them_early(
    schedule: Schedule,
) -> None:
    for steps in schedule.exchanges:
        users = [number for number, step in enumerate(steps) for _ in step.receives]
        posted: list[ChunkTransfer] = []
        for number, posts in enumerate(plan_posts(steps)):
            posted += posts
            assert sum(user <= number for user in users) <= len(posted)
            assert sum(user > number for user in users[: len(posted)]) <= AHEAD
        assert posted == [message for step in steps for message in step.receives]


@given(schedules())
def test_the_compute_stays_and_each_chunk_is_resharded_once_behind_its_last_action(
    schedule: Schedule,
) -> None:
    sharded = with_sharding(schedule)
    assert simulate(sharded).makespan == simulate(schedule).makespan
    for rank, own in enumerate(sharded.lists):
        assert tuple(action for action in own if action.is_compute) == schedule.lists[rank]
        for chunk in schedule.chunks[rank]:
            first, *_, last = kinds = [action.kind for action in own if action.chunk == chunk]
            assert (first, last) == (Kind.UNSHARD, Kind.RESHARD)
            assert kinds.count(Kind.UNSHARD) == kinds.count(Kind.RESHARD) == 1
