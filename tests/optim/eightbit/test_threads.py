"""Ranges of blocks are covered once, whatever the number of threads; errors come back."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.optim.eightbit import step as threads
from zeroshard.optim.eightbit.step import BlockBatch


def over_blocks(work, num_blocks):
    batch = BlockBatch()
    batch.add(work, num_blocks)
    batch.run()


@pytest.fixture
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [2], indirect=True)
@pytest.mark.parametrize("failing", [0, 500])
def test_an_error_in_any_thread_is_raised_when_all_have_ended(num_threads, failing):
    ended = []

    def work(first, last):
        if first == failing:
            raise RuntimeError(f"blocks from {first}")
        ended.append(first)

    with pytest.raises(RuntimeError, match=f"blocks from {failing}"):
        over_blocks(work, 1000)
    assert len(ended) == 1


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 9))
def test_ranges_are_cut_into_parts_of_the_same_size(sizes, num_threads):
    seen, batch = [], BlockBatch()
    for number, size in enumerate(sizes):
        batch.add(lambda *part, number=number: seen.append((number, range(*part))), size)
    with (
        mock.patch.object(threads, "_FEWEST", 1),
        mock.patch.object(torch, "get_num_threads", return_value=num_threads),
    ):
        batch.run()
    for number, size in enumerate(sizes):
        assert sorted(block for own, part in seen if own == number for block in part) == list(range(size))
    assert len(seen) <= len(sizes) + num_threads  # each cut makes one more
    assert max((len(part) for _, part in seen), default=0) <= -(-sum(sizes) // num_threads)


@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
def test_calls_follow_the_works_of_a_batch_and_are_left_out_after_an_error(num_threads):
    batch, done = BlockBatch(), []
    for name in "ab":
        batch.add(lambda first, last, name=name: done.append((name, last - first)), 200)
        batch.then(lambda name=name: done.append(name))
    batch.run()
    assert done[-2:] == ["a", "b"]
    assert sum(number for _, number in done[:-2]) == 400
    batch.run()  # nothing is left
    assert len(done) <= 2 + 2 + num_threads

    def fail(first, last):
        raise RuntimeError("these blocks")

    batch.add(fail, 1)
    batch.then(lambda: done.append("after the error"))
    with pytest.raises(RuntimeError, match="these blocks"):
        batch.run()
    assert "after the error" not in done
