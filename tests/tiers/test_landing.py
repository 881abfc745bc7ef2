"""Host memory of reduced gradients is used again, and by nobody else while somebody holds it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.tiers.held import held_bytes
from zeroshard.comm.streams import Streams
from zeroshard.sharding.landing import Landing
from zeroshard.tiers.places import TierMemory

SIZE = 1024


@pytest.fixture
def context():
    device = torch.device("cpu")
    memory = TierMemory(device, None, 0)
    return SimpleNamespace(streams=Streams.on(device), memory=memory, landed=[])


def land(landing, values):
    with landing.beside(values):
        return landing.land(values)


def test_buffers_of_one_size_share_memory_that_is_free(context):
    before, addresses = held_bytes().host, set()
    for number in range(6):
        landing = Landing(context, SIZE)
        gradient = land(landing, torch.full((SIZE,), float(number)))[:10]  # p.grad is such a view
        landing.wait()
        assert gradient.eq(number).all()
        addresses.add(gradient.data_ptr())
        del gradient
    assert len(addresses) == len(context.landed) == 1
    assert held_bytes().host - before == SIZE * 4


def test_memory_that_is_held_is_not_written_to(context):
    landing = Landing(context, SIZE)
    first, second = land(landing, torch.ones(SIZE)), land(landing, torch.zeros(SIZE))
    part = first[:4]
    del first
    land(landing, torch.zeros(SIZE))
    landing.wait()
    assert part.eq(1).all()
    assert second.eq(0).all()
