"""Host memory of reduced gradients is used again, and by nobody else while somebody holds it."""

from __future__ import annotations

import pytest
import torch

from tests.stores.held import held_bytes
from zeroshard.comm.streams import Streams
from zeroshard.stores.store import HostGradients, TierMemory

SIZE = 1024


@pytest.fixture
def store():
    device = torch.device("cpu")
    return HostGradients(TierMemory(device, None, 0), Streams.on(device).to_host)


def leave(store, values):
    with store.beside(values):
        return store.store(values)


def test_buffers_of_one_size_share_memory_that_is_free(store):
    before, addresses = held_bytes().host, set()
    for number in range(6):
        gradient = leave(store, torch.full((SIZE,), float(number)))[:10]  # p.grad is such a view
        store.wait()
        assert gradient.eq(number).all()
        addresses.add(gradient.data_ptr())
        del gradient
    assert len(addresses) == len(store.places) == 1
    assert held_bytes().host - before == SIZE * 4


def test_memory_that_is_held_is_not_written_to(store):
    first, second = leave(store, torch.ones(SIZE)), leave(store, torch.zeros(SIZE))
    part = first[:4]
    del first
    leave(store, torch.zeros(SIZE))
    store.wait()
    assert part.eq(1).all()
    assert second.eq(0).all()
