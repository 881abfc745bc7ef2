"""Steps between a forward and its backward, and edits before a part is called alone.

Plain PyTorch refuses a backward that has saved a value from before a step. So do all stages.
"""

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.models import Stemmed
from tests.distributed.training import ALL_STAGES, flat_gradients, full_gradients, numbers, start, unequal
from tests.ranks import on_ranks
from zeroshard import Config

REFUSED = "modified by an inplace operation"
BF16 = {"param_dtype": "bfloat16"}


def loss(model, number=0):
    """The same batch on all ranks."""
    return model(numbers(number, 5, 7, rank=0)).float().square().mean()


def step_between(model, optimizer):
    loss(model, 1).backward()
    late = loss(model)
    optimizer.step()
    late.backward()


def step_and_forward_between(model, optimizer):
    loss(model, 1).backward()
    late = loss(model)
    optimizer.step()
    loss(model, 1).backward()
    late.backward()


def second_backward_after_a_step(model, optimizer):
    late = loss(model)
    late.backward(retain_graph=True)
    optimizer.step()
    late.backward()


@torch.no_grad()
def halve(model):
    for parameter in model.parameters():
        parameter.mul_(0.5)


def settings():
    return [(stage, precision) for stage in ALL_STAGES for precision in ({}, BF16)]


def engine_of(stage, precision, **config):
    return start(Stemmed(), "SGD", stage=stage, units=["Residual"], precision=precision, **config)


@on_ranks(1, 2)
def test_a_backward_of_values_before_a_step_is_refused_as_in_plain_pytorch():
    """The ways and settings in which values from before a step are used, or those after it, in silence."""
    found = []
    ways = (step_between, step_and_forward_between, second_backward_after_a_step)
    for way in ways:
        plain = Stemmed()
        with pytest.raises(RuntimeError, match=REFUSED):
            way(plain, torch.optim.SGD(plain.parameters()))
        for setting in settings():
            engine, optimizer = engine_of(*setting)
            try:
                way(engine.module, optimizer)
                found.append((way.__name__, setting))
            except RuntimeError as error:
                found += [] if REFUSED in str(error) else [str(error)]
    return found


class Pair(nn.Module):
    """Both halves have layers outside of blocks, which lie in one buffer."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = Stemmed(), Stemmed()
        self.made = nn.Linear(7, 7)

    def forward(self, x, makes):
        return self.made(self.maker(x)) if makes else self.judge(x)


def played(model, optimizers):
    """The losses of two networks that are stepped in turn: a graph of one lives over the other's step."""
    losses = []
    for number in range(3):
        made = model(numbers(number, 5, 7, rank=0), makes=True)
        losses.append(model(made.detach(), makes=False).square().mean())
        losses[-1].backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        losses.append(model(made, makes=False).mean())
        losses[-1].backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [value.item() for value in losses]


def halves_of(model):
    judge = set(model.judge.parameters())
    halves = [p for p in model.parameters() if p not in judge], list(judge)
    return [torch.optim.SGD(half, lr=0.1) for half in halves]


def only_one(model):
    """One optimizer for both: it steps the parameters that have a gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [optimizer, optimizer]


@pytest.mark.parametrize("make", [halves_of, only_one])
@on_ranks(2)
def test_a_step_outdates_no_values_of_other_parameters(make):
    plain = Pair()
    runs = [played(plain, make(plain))]
    for stage in ALL_STAGES:
        model = Pair()
        sharded = zeroshard.shard(model, Config(stage=stage, units=["Residual"]))
        optimizers = make(model)
        for optimizer in dict.fromkeys(optimizers):
            sharded.attach(optimizer)
        runs.append(played(model, optimizers))
    plain, *runs = runs
    assert runs == [pytest.approx(plain, rel=1e-6)] * len(ALL_STAGES)


@on_ranks(1, 2)
def test_a_part_called_alone_follows_edits():
    found = []
    for stage in ALL_STAGES:
        plain, (engine, _) = Stemmed(), engine_of(stage, {})
        for model in (plain, engine.module):
            for number in range(2):
                halve(model)
                model.blocks[1](numbers(number, 5, 7, rank=0)).square().mean().backward()
        found += unequal(f"stage {stage}", full_gradients(engine), flat_gradients(plain))
    return found
