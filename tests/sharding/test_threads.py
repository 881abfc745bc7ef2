"""Ranges of blocks are covered once, whatever the number of threads; errors come back."""

import threading

import pytest
import torch

from zeroshard.stepping.threads import over_blocks


@pytest.fixture
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5], indirect=True)
@pytest.mark.parametrize("num_blocks", [0, 1, 63, 64, 127, 128, 129, 1000])
def test_each_block_is_worked_on_once(num_threads, num_blocks):
    seen, lock = [], threading.Lock()

    def work(first, last):
        with lock:
            seen.append((first, last))

    over_blocks(work, num_blocks)
    assert sorted(block for part in seen for block in range(*part)) == list(range(num_blocks))
    assert len(seen) <= max(1, num_threads)


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
