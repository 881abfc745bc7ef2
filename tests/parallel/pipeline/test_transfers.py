"""The transfers that follow from a schedule."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given

from tests.parallel.pipeline.random_schedules import schedules
from zeroshard.parallel.pipeline.actions import (
    Action,
    ChunkTransfer,
    Kind,
    Schedule,
    needed_actions,
    parse_schedule,
    plan_exchanges,
)
from zeroshard.parallel.pipeline.schedules import build_schedule


def plan_transfers(schedule: Schedule) -> list[list[ChunkTransfer]]:
    """The sends and receives of each rank, in order."""
    return [
        [transfer for exchange in exchanges for transfer in (*exchange.receives, *exchange.sends)]
        for exchanges in plan_exchanges(schedule)
    ]


@given(schedules())
def test_messages_of_two_ranks_have_one_order_on_both_sides(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[ChunkTransfer]] = defaultdict(list)
    received: dict[tuple[int, int], list[ChunkTransfer]] = defaultdict(list)
    for rank, transfers in enumerate(plan_transfers(schedule)):
        for transfer in transfers:
            assert rank in (transfer.source, transfer.target)
            (sent if rank == transfer.source else received)[transfer.source, transfer.target].append(transfer)
    assert sent == received


@given(schedules())
def test_each_boundary_between_two_ranks_is_crossed_twice_for_each_microbatch(schedule: Schedule) -> None:
    expected = [
        (chunk, microbatch, is_activation)
        for chunk, (here, there) in enumerate(zip(schedule.placement, schedule.placement[1:], strict=False))
        for microbatch in range(schedule.num_microbatches)
        for is_activation in (False, True)
        if here != there
    ]
    transfers = {transfer for own in plan_transfers(schedule) for transfer in own}
    found = [
        (min(each.action.place, each.user.place)[0], each.action.microbatch, each.is_activation)
        for each in transfers
    ]
    assert sorted(found) == expected


@given(schedules())
def test_an_action_receives_all_that_it_needs_before_it_and_sends_directly_behind_it(
    schedule: Schedule,
) -> None:
    needed = needed_actions(schedule)
    for rank, exchanges in enumerate(plan_exchanges(schedule)):
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
    first = plan_exchanges(schedule)[1][0]
    assert str(first.action) == "1F1"
    assert [str(transfer.action) for transfer in first.receives] == ["0F0", "0F1"]


def test_halves_of_a_backward_send_the_gradient_after_the_first_half() -> None:
    schedule = build_schedule("zb-h1", 2, 1)
    sends = [(str(each.action), len(each.sends)) for each in plan_exchanges(schedule)[1]]
    assert sends == [("1F0", 0), ("1I0", 1), ("1W0", 0)]


def test_nothing_is_sent_between_two_chunks_of_a_rank() -> None:
    exchanges = plan_exchanges(build_schedule("zbv", 2, 1))
    (middle,) = [each for each in exchanges[1] if each.action == Action(Kind.FORWARD, 1, 0)]
    assert len(middle.receives) == 1
    assert not middle.sends
    assert not any(plan_transfers(build_schedule("interleaved", 1, 4, 3)))
