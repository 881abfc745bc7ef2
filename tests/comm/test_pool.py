"""Scratch buffers, never used by two at once; tensors of several devices, where meta is an accelerator."""

from __future__ import annotations

import gc
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from zeroshard.comm import moves
from zeroshard.comm.pool import BufferPool
from zeroshard.stepping.clipping import scale_

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
    pool.drop(used)  # somebody keeps it
    assert pool.num_bytes == 0


def test_tensors_are_grouped_by_their_device_in_their_order() -> None:
    tensors = [torch.zeros(1, device=device) for device in ("meta", "cpu", "meta", "cpu")]
    assert moves.by_device(tensors) == [[0, 2], [1, 3]]
    assert moves.by_device([]) == []


def test_a_tensor_moves_to_the_device_of_another_one_or_stays_as_it_is() -> None:
    here, there = torch.ones(3), torch.ones(2, device="meta")
    assert moves.beside(here, torch.zeros(1)) is here
    assert moves.beside(here, there).device == there.device
    assert moves.to_device(here, torch.device("meta")).shape == here.shape


def test_gradients_on_two_devices_are_scaled_by_one_factor() -> None:
    narrow = torch.full((4,), 2.0, dtype=torch.bfloat16)
    tensors = [torch.ones(3, device="meta"), torch.full((2,), 4.0), narrow, narrow.to("meta")]
    scale_(tensors, torch.tensor(0.5))
    assert tensors[1].tolist() == [2.0, 2.0]
    assert narrow.tolist() == [1.0] * 4
