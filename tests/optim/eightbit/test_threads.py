"""Blocks are covered once, whatever the number of threads; errors come back."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.optim.eightbit import step as threads


@pytest.mark.parametrize("failing", [0, 500])
def test_an_error_in_any_thread_is_raised_when_all_have_ended(failing):
    ended = []

    def work(first, last):
        if first == failing:
            raise RuntimeError(f"blocks from {first}")
        ended.append(first)

    with mock.patch.object(torch, "get_num_threads", return_value=2), pytest.raises(RuntimeError) as error:
        threads.over_threads(work, 1000)
    assert str(error.value) == f"blocks from {failing}"
    assert len(ended) == 1


@given(st.integers(0, 300), st.integers(1, 9))
def test_blocks_are_cut_into_parts_of_the_same_size(size, num_threads):
    seen = []
    with (
        mock.patch.object(threads, "_FEWEST", 1),
        mock.patch.object(torch, "get_num_threads", return_value=num_threads),
    ):
        threads.over_threads(lambda *part: seen.append(range(*part)), size)
    assert sorted(block for part in seen for block in part) == list(range(size))
    assert max(map(len, seen)) - min(map(len, seen)) <= 1
