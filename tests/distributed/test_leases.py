"""Units are freed when nobody needs them, whatever the order of forwards, backwards and steps."""

import pytest
import torch
from torch import nn

import zeroshard
from tests.ranks import on_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Routed(nn.Module):
    """Its blocks run in an order that is set from outside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.order = range(6)

    def forward(self, x):
        for number in self.order:
            x = self.blocks[number](x)
        return x


def batch(seed):
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_prefetch", [0, 1])
@on_ranks(2)
def test_a_unit_that_ended_the_last_forward_is_freed_in_the_next_one_too(num_prefetch):
    """The peak of a forward that begins with the unit that ended the one before, and the estimate of both."""
    model = Routed()
    config = {"stage": 3, "units": ["Block"], "num_prefetch": num_prefetch}
    engine = zeroshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config).engine
    meter = engine._runtime.context.meter
    found = []
    for _ in range(3):
        model.order = (0, 1, 2, 3, 4, 5)
        engine(batch(1))
        meter.peak = meter.now
        model.order = (5, 0, 1, 2, 3, 4)
        loss = engine(batch(2)).sum()
        found.append(meter.peak)
        loss.backward()
        engine.zero_grad()
    estimated = zeroshard.estimate(Routed(), 2, engine.config).peak_unsharded
    assert max(found) <= estimated
