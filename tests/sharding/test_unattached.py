"""Optimizers over engine.parameters() that `initialize` was not given: gathers follow their steps."""

import pytest
import torch
from torch import nn

import zeroshard
from tests.ranks import on_ranks

NVME = {"optimizer": "nvme", "parameters": "nvme"}


def start(stage, folder=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    config = {"stage": stage, "precision": "bf16"}
    if folder is not None:
        config["offload"] = {**NVME, "nvme_path": str(folder)}
    engine = zeroshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config).engine
    # torch does not count what a fused kernel writes.
    return engine, torch.optim.AdamW(engine.parameters(), lr=0.05, fused=True)


def loss_of(engine):
    generator = torch.Generator().manual_seed(1)
    return engine(torch.randn(4, 5, generator=generator)).float().square().mean()


def after_a_step_of_the_engine(engine, other):
    engine.backward(loss_of(engine))
    engine.optimizer.step()  # it waits where values travel
    other.step()
    engine.optimizer.zero_grad()


def with_a_closure(engine, other):
    def closure():
        other.zero_grad()
        loss = loss_of(engine)
        loss.backward()
        return loss

    other.step(closure)


def with_gradients_on_one_rank(engine, other):
    loss_of(engine).backward()
    for name, p in engine.named_parameters():
        if name != "2.bias":
            p.grad = None
    other.step()
    other.zero_grad()


@pytest.mark.parametrize(
    "train",
    [after_a_step_of_the_engine, with_a_closure, with_gradients_on_one_rank],
    ids=lambda it: it.__name__,
)
@on_ranks(1, 3)
def test_the_next_forward_has_the_values_of_the_step(tmp_path, train):
    for stage, folder in ((1, None), (3, None), (3, tmp_path)):
        engine, other = start(stage, folder)
        for _ in range(2):
            train(engine, other)
        found = loss_of(engine).item()
        with torch.no_grad():
            for p in engine.parameters():
                p.mul_(1.0)  # torch counts it: all is gathered anew
        assert found == loss_of(engine).item(), (stage, folder)
        engine.close(restore=False)
