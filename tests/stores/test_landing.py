"""Host memory of reduced gradients is used again, and by nobody else while somebody holds it."""

from __future__ import annotations

import pytest
import torch

from tests.stores.held import held_bytes
from zeroshard.comm.streams import Streams
from zeroshard.stores.landing import Landing
from zeroshard.stores.store import TierMemory

SIZE = 1024


@pytest.fixture
def landing():
    device = torch.device("cpu")
    return Landing(TierMemory(device, None, 0), Streams.on(device).to_host)


def land(landing, values):
    with landing.beside(values):
        return landing.land(values)


def test_buffers_of_one_size_share_memory_that_is_free(landing):
    before, addresses = held_bytes().host, set()
    for number in range(6):
        gradient = land(landing, torch.full((SIZE,), float(number)))[:10]  # p.grad is such a view
        landing.wait()
        assert gradient.eq(number).all()
        addresses.add(gradient.data_ptr())
        del gradient
    assert len(addresses) == len(landing.landed) == 1
    assert held_bytes().host - before == SIZE * 4


def test_memory_that_is_held_is_not_written_to(landing):
    first, second = land(landing, torch.ones(SIZE)), land(landing, torch.zeros(SIZE))
    part = first[:4]
    del first
    land(landing, torch.zeros(SIZE))
    landing.wait()
    assert part.eq(1).all()
    assert second.eq(0).all()
