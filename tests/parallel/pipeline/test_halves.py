"""Schedules with divided backwards draw the numbers of others, and leave products of all layers for later."""

import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import sgd, start, train
from zeroshard.parallel.pipeline.weights import Waiting

WIDTH, STEPS, NUM = 32, 2, 4


class Twice(nn.Module):
    """A layer that computes twice, between two others."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.outer(nn.functional.gelu(self.inner(torch.tanh(self.inner(self.norm(x)))))))


def config_of(schedule):
    return {"stage": 3, "mesh": {"pp": 2}, "pipeline": {"schedule": schedule, "num_microbatches": NUM}}


def trained(schedule):
    torch.manual_seed(0)
    blocks = nn.Linear(WIDTH, WIDTH), *(Twice() for _ in range(5)), nn.LayerNorm(WIDTH)
    loss_fn = nn.functional.mse_loss
    engine = zeroshard.initialize(
        nn.Sequential(*blocks).double(), sgd, config_of(schedule), loss_fn=loss_fn
    ).engine
    torch.manual_seed(5)
    for _ in range(STEPS):
        x = torch.randn(NUM, 6, WIDTH, dtype=torch.float64)
        engine.train_batch(x, x.flip(1))
    with engine.unsharded():
        state = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    engine.close(restore=False)
    return state


def test_divided_backwards_draw_no_random_numbers(ranks):
    want, found = (
        {name: value for state in ranks(2, trained, schedule) for name, value in state.items()}
        for schedule in ("1f1b", "zb-h1")
    )
    assert found.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in found.items())


def num_waiting():
    """The products of a micro-batch whose weight gradients wait on this rank."""
    noted, note = [], Waiting.note
    Waiting.note = lambda self, *args: noted.append(args) or note(self, *args)
    try:
        engine = start("llama", config_of("zb-h1"))
        train(engine, range(STEPS))
    finally:
        Waiting.note = note
    engine.close(restore=False)
    return len(noted) / (STEPS * NUM)


def test_the_weight_gradients_of_all_linear_layers_wait(ranks):
    assert ranks(2, num_waiting) == [2 * 7, 2 * 7 + 1]
