"""A backward that comes through no unit gives gradients to freed parameters, and gathers nothing."""

import itertools

import pytest
import torch
from torch import nn

import zeroshard
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.weights import Products, Waiting
from zeroshard.sharding.context import Changes

WIDTH, NUM = 6, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(WIDTH, 1)).double()


def values_of(number, rank):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank)).double()


def require(halves):
    """Compare with the mean over the ranks of the gradients of all micro-batches."""
    found = halves.gradients()
    model = layers()
    for rank, number in itertools.product(range(2), range(NUM)):
        (model(values_of(number, rank)).square().mean() / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.pop(name), parameter.grad, rtol=0, atol=1e-14, msg=name)
    assert not found


class Halves:
    """A sharded model whose backwards come in two halves."""

    def __init__(self, stage):
        config = {"stage": stage, "units": ["Layer"]}
        self.engine = zeroshard.initialize(layers(), torch.optim.AdamW, config).engine
        self.runtime = self.engine._runtime
        self.products = Products(self.engine.module, Changes())

    def first(self, number):
        """Run a forward and the first half of its backward; return the second half."""
        waiting, rank = Waiting(), self.engine.dp_rank
        with self.products.deferring(waiting):
            loss = self.engine.module(values_of(number, rank)).square().mean()
            with self.runtime.reducer.next_backward(True):
                loss.backward()
        return waiting

    def second(self, waiting, has_more):
        with self.runtime.reducer.next_backward(has_more), self.runtime.passes.delivering():
            waiting.compute()

    def gathers(self):
        return self.engine.comm_report().calls["all_gather"]

    def gradients(self):
        names = [name for name, _ in self.engine.module.named_parameters()]
        return {name: self.engine.full_gradient(name).clone() for name in names}


@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_second_halves_add_to_first_ones_and_gather_nothing(stage):
    halves = Halves(stage)
    waiting = [halves.first(number) for number in range(NUM)]
    before = halves.gathers()
    for number, one in enumerate(waiting):
        halves.second(one, has_more=number < NUM - 1)
    assert halves.gathers() - before == (5 if stage == 0 else 0)  # of the sums of 5 units, at stage 0
    require(halves)
