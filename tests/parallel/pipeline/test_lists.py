"""What follows from the lists of a schedule: transfers, actions of the sharding, activations in flight."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given

from tests.parallel.pipeline.random_schedules import schedules
from zeroshard.parallel.pipeline.actions import (
    ChunkTransfer,
    Kind,
    Schedule,
    needed_actions,
    parse_schedule,
    plan_exchanges,
    with_sharding,
)
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.simulate import count_activations, simulate


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


# ----------------------------------------------------------------------------------------------- the sharding


TWO = parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")


def test_a_chunk_is_unsharded_once_a_batch() -> None:
    assert str(with_sharding(TWO)) == (
        "0UNSHARD,0F0,0F1,0B0,0B1,0RESHARD\n1UNSHARD,1F0,1B0,1F1,1B1,1RESHARD\n"
    )


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


def test_the_chunks_of_a_rank_count_with_their_weights() -> None:
    schedule = build_schedule("interleaved", 2, 4)
    assert str(schedule).startswith("0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,")
    assert count_activations(schedule).per_rank == (5, 3)  # rank 0: after 0F2
    assert count_activations(schedule, (1, 1, 0, 0)).per_rank == (4, 3)  # rank 0: after 0F3
    assert count_activations(schedule, (0, 0, 10, 10)).per_rank == (20, 10)  # rank 0: after 2F1
