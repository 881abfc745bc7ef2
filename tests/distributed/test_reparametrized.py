"""Attributes of parameters, and autocast."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import (
    SOME_STAGES,
    apart,
    finish,
    numbers,
    sgd,
    start,
)
from tests.ranks import on_ranks


def base():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2))
    return nn.Sequential(nn.Linear(7, 7), *blocks, nn.Linear(7, 3))


@pytest.mark.parametrize("stage", SOME_STAGES)
@on_ranks(2)
def test_attributes_of_parameters_are_seen_before_and_after_initialize_and_in_forward(stage):
    model = base()
    for name, parameter in model.named_parameters():
        parameter.no_decay = name.endswith("bias")
    model[0].weight.tensor_model_parallel = tag = object()
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.tensor_model_parallel))
    asked = []

    def factory(parameters):
        parameters = list(parameters)
        asked.extend(parameter.no_decay for parameter in parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    engine, *_ = zeroshard.initialize(model, factory, {"stage": stage})
    engine(numbers(0, 5, 7))
    with engine.unsharded():
        seen.append(engine.module[0].weight.tensor_model_parallel)
        shown = [parameter.no_decay for parameter in engine.module.parameters()]
    kept = [parameter.no_decay for parameter in engine.parameters()]
    assert asked == shown == kept
    assert any(kept)
    assert not all(kept)
    assert seen == [tag, tag]


def accumulate_in_autocast(model, optimizer, number, *, averages):
    """Two micro-batches, each with a backward, and a step."""
    losses = []
    for part in range(2):
        loss = model(numbers(number + 50 * part, 5, 7)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    for parameter in model.parameters() if averages else ():
        parameter.grad *= 1 / dist.get_world_size()
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return losses


@on_ranks(2)
def test_casts_that_autocast_caches_are_not_used_after_a_step():
    """Several steps inside one context, which caches the casts of parameters to its end."""
    for stage in SOME_STAGES:
        config = {}
        model = base()
        plain = copy.deepcopy(model)
        optimizer = sgd(plain)
        engine, own = start(model, sgd(model), stage=stage, **config)
        got, want = [], []
        with torch.autocast("cpu", torch.bfloat16):
            for number in range(3):
                got += accumulate_in_autocast(engine, own, number, averages=False)
        for number in range(3):  # a context for each step, as torch advises
            with torch.autocast("cpu", torch.bfloat16):
                want += accumulate_in_autocast(plain, optimizer, number, averages=True)
        found = apart(f"stage {stage}", finish(engine, got), finish(plain, want))
        assert found == []
