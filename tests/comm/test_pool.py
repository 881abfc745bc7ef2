"""Scratch buffers are used again, and never by two at once."""

import gc
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from zeroshard.comm.pool import BufferPool

KINDS = [(dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in (4, 8)]


@pytest.fixture
def pool():
    return BufferPool(torch.device("cpu"))


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), max_size=40))
def test_no_buffer_is_in_use_twice_and_no_more_bytes_are_held_than_were_in_use_at_once(steps):
    pool = BufferPool(torch.device("cpu"))
    used = {kind: [] for kind in KINDS}
    in_use = most = 0
    for kind, is_take in steps:
        if is_take:
            buffer = pool.take(*kind)
            assert all(buffer is not other for buffers in used.values() for other in buffers)
            used[kind].append(buffer)
        elif used[kind]:
            pool.give(used[kind].pop(0))
        in_use = sum(buffer.nbytes for buffers in used.values() for buffer in buffers)
        most = max(most, in_use)
        assert in_use <= pool.num_bytes <= most


def test_the_oldest_free_buffers_make_room_for_another_size(pool):
    """As in a model whose units all have other sizes."""
    for size in range(100, 0, -1):
        pool.give(pool.take(torch.float32, size))
        assert pool.num_bytes <= 4 * 100
    for size in range(1, 200):
        pool.give(pool.take(torch.float32, size))
        assert pool.num_bytes <= 4 * max(100, size)


def test_on_an_accelerator_nothing_is_kept():
    pool = BufferPool(torch.device("meta"))
    buffer = pool.take(torch.float32, 8)
    assert pool.num_bytes == 32
    pool.give(buffer)
    assert pool.num_bytes == 0
    assert pool.take(torch.float32, 8) is not buffer


def test_released_buffers_are_freed_and_those_in_use_are_not(pool):
    free, used = pool.take(torch.float32, 8), pool.take(torch.float32, 8)
    pool.give(free)
    gone, there = weakref.ref(free), weakref.ref(used)
    del free
    pool.release()
    gc.collect()
    assert gone() is None
    assert there() is used
    pool.give(used)
    assert pool.take(torch.float32, 8) is used


def test_a_buffer_that_somebody_keeps_is_no_longer_counted(pool):
    kept = pool.take(torch.float32, 8)
    pool.drop(kept)
    assert pool.num_bytes == 0
    assert pool.take(torch.float32, 8) is not kept
