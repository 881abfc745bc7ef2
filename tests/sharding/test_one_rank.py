"""Forwards of units on one rank: their parameters are shown while they run, also in unusual ways."""

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.parameters.sharded import ShardedParameter


class Block(nn.Module):
    """Its forward uses its weight twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(self.linear(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x))


@pytest.fixture
def engine():
    return zeroshard.initialize(Net(), torch.optim.AdamW, {"stage": 3, "units": ["Block"]}).engine


def is_shown(block):
    return not isinstance(block.linear.weight, ShardedParameter)


X = torch.linspace(-1, 1, 8).view(2, 4)


def test_a_hook_that_fails_before_ours_leaves_the_unit_as_it_was(engine):
    def fail(module, args):
        raise LookupError("a hook that fails")

    want = engine(X)
    handle = engine.module.second.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(LookupError):
        engine(X)
    handle.remove()
    assert not is_shown(engine.module.first)
    assert not is_shown(engine.module.second)
    assert torch.equal(engine(X), want)
    assert not is_shown(engine.module.second)


def test_a_unit_may_be_called_by_itself(engine):
    plain = Net()
    assert torch.equal(engine.module.second(X), plain.second(X))
    assert not is_shown(engine.module.second)
