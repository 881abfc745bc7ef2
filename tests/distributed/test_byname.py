"""One full parameter, gradient or state by name: read as in plain PyTorch, written for training to go on."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.ranks import on_ranks


class Net(nn.Module):
    """Tied, frozen, unused, 0-dim; one matrix larger than a shard's block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(30, 20)
        self.blocks = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.unused = nn.Linear(20, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(20, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.frozen(x)) * self.gain


def loss(model, number):
    """The mean over this rank's part of a batch; over all ranks, that of the whole batch."""
    tokens = torch.randint(30, (4, 5), generator=torch.Generator().manual_seed(number))
    part = (
        tokens.chunk(dist.get_world_size())[dist.get_rank()]
        if isinstance(model, zeroshard.Engine)
        else tokens
    )
    return model(part).square().mean()


class Pair:
    """An engine and the model that it was made from, in plain PyTorch."""

    def __init__(self, **config):
        self.plain, sharded = Net(), Net()
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-2)
        made = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        self.engine = zeroshard.initialize(sharded, made, config).engine

    def backward(self, number):
        loss(self.plain, number).backward()
        self.engine.backward(loss(self.engine, number))

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.step()

    def check(self):
        """Raise if a parameter, gradient or state is another one than in plain PyTorch."""
        for name, parameter in self.plain.named_parameters(remove_duplicate=False):
            close(self.engine.full_parameter(name), parameter.detach())
            gradient = self.engine.full_gradient(name)
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                close(gradient, parameter.grad)
            states = self.engine.full_optimizer_state(name)
            assert states.keys() == self.optimizer.state[parameter].keys()
            for key, value in self.optimizer.state[parameter].items():
                close(states[key], value)


def close(got, want):
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


def eight_bits(stage):
    torch.manual_seed(0)
    model, whole = nn.Sequential(nn.Linear(80, 80)), nn.Sequential(nn.Linear(80, 80))
    whole.load_state_dict(model.state_dict())
    optimizer = zeroshard.optim.AdamW8bit(model.parameters(), lr=1e-2)
    engine = zeroshard.initialize(model, optimizer, {"stage": stage}).engine
    plain = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    values = torch.randn(4, 80, generator=torch.Generator().manual_seed(1))
    for module in (engine, whole):
        module(values).square().mean().backward()
    optimizer.step()
    plain.step()
    found = engine.full_optimizer_state("0.weight")
    want = plain.state[whole[0].weight]
    for key in ("exp_avg", "exp_avg_sq"):
        assert found[key].dtype == torch.float32
        torch.testing.assert_close(found[key], want[key], rtol=0.1, atol=0.02 * float(want[key].abs().max()))
    assert found["step"] == 1
    engine.set_full_optimizer_state("0.weight", {"exp_avg": found["exp_avg"] * 2, "step": 7})
    again = engine.full_optimizer_state("0.weight")
    bound = 0.01 * float(found["exp_avg"].abs().max())
    torch.testing.assert_close(again["exp_avg"], found["exp_avg"] * 2, rtol=0.05, atol=bound)
    assert torch.equal(again["exp_avg_sq"], found["exp_avg_sq"])
    assert again["step"] == 7
    assert isinstance(again["step"], int)


@pytest.mark.long
@on_ranks(2)
def test_states_of_8_bits_come_back_in_float32():
    for stage in (0, 1, 3):
        eight_bits(stage)


@on_ranks(2)
def test_unknown_names_and_values_that_do_not_fit_are_refused_on_all_ranks():
    pair = Pair(stage=3)
    engine, rank = pair.engine, dist.get_rank()

    def refused(words, call, *args, kind=ValueError):
        with pytest.raises(kind, match=re.escape(words)):
            call(*args)

    name, whole = "blocks.0.weight", torch.zeros(20, 20)
    refused("got 'blocks.0.wieght'; close: 'blocks.0.weight'", engine.full_parameter, "blocks.0.wieght")
    refused("got None", engine.full_gradient, None)
    one_name = "expected one name on all ranks, got ['blocks.1.weight', 'blocks.0.weight']"
    refused(one_name, engine.full_parameter, name if rank else "blocks.1.weight")
    shape = "'blocks.0.weight': expected a full tensor of shape (20, 20), got shape (400,)"
    refused(shape, engine.set_full_parameter, name, torch.zeros(400))
    different = "ranks 0 and 1 were given different values for 'blocks.0.weight'"
    refused(different, engine.set_full_parameter, name, whole + rank)
    refused("'frozen.weight' is frozen", engine.set_full_gradient, "frozen.weight", whole)
    before = "expected states of 'blocks.0.weight' (none before the first step), got 'exp_avg'"
    refused(before, engine.set_full_optimizer_state, name, {"exp_avg": whole})
    pair.backward(0)
    pair.step()
    after = "expected states of 'blocks.0.weight' (step, exp_avg, exp_avg_sq), got 'exp_agv'"
    refused(after, engine.set_full_optimizer_state, name, {"exp_agv": whole})
    with engine.unsharded():
        inside = "full_parameter() inside engine.unsharded()"
        refused(inside, engine.full_parameter, name, kind=RuntimeError)
    pair.check()
