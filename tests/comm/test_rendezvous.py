from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest

from tests.ranks import RankError, Ranks
from zeroshard.comm.mesh import open_store

STARTS = 4


def start_again_and_again(late: int) -> list[tuple[bool, str]]:
    """Whether each start sees an address of the one before, and what it gets from rank 0."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen = []
    for number in range(STARTS):
        if rank == late:
            time.sleep(0.2)  # so that the others read what was written at the start before
        store = open_store(rank, size, timedelta(seconds=20))
        is_stale = store.check([f"address {rank}"])
        store.set(f"address {rank}", f"{number}")
        seen.append((is_stale, store.get("address 0").decode()))
        for other in range(size):
            store.get(f"address {other}")
    return seen


@pytest.mark.long_where(late=[0])
@pytest.mark.parametrize("late", [0, 2])
def test_a_start_does_not_see_what_the_one_before_left_in_the_store(ranks: Ranks, late: int) -> None:
    expected = [(False, str(number)) for number in range(STARTS)]
    assert ranks(3, start_again_and_again, late, process_group=False) == [expected] * 3


def come_unless_last() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank + 1 < size:
        open_store(rank, size, timedelta(seconds=1))


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, come_unless_last, process_group=False)
    assert caught.value.errors[1] is None
    assert caught.value.errors[0] is not None
