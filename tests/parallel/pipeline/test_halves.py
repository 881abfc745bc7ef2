"""Sharded models train by schedules with divided backwards as in one process, to the bit."""

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import (
    LENGTH,
    VOCABULARY,
    llama,
    mixtral,
    train_plainly,
)
from zeroshard.parallel.pipeline.weights import Waiting

WIDTH, STEPS, NUM = 32, 2, 4


class Twice(nn.Module):
    """A layer that computes twice, between two others."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.outer(nn.functional.gelu(self.inner(torch.tanh(self.inner(self.norm(x)))))))


def sequence(dropout=0.2):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Twice(dropout) for _ in range(5)), nn.LayerNorm(WIDTH))


MODELS = {
    "Llama": llama,
    "sequence": sequence,
    "Mixtral": mixtral,
}


def build(kind):
    torch.manual_seed(0)
    return MODELS[kind]().double().train()


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05, momentum=0.9)


def batch_of(kind, number):
    """One sample a micro-batch."""
    generator = torch.Generator().manual_seed(number)
    if kind == "sequence":
        x = torch.randn(NUM, LENGTH, WIDTH, generator=generator).double()
        return x, x.flip(1)
    tokens = torch.randint(VOCABULARY, (NUM, LENGTH), generator=generator)
    return {"input_ids": tokens}, tokens


def square(output, targets):
    return (output - targets).square().mean()


def plain(kind):
    """Train in one process.

    A rank of the tests runs it, with as many threads as the others: sums of a norm are cut among threads.
    """
    model = build(kind)
    train_plainly(model, [batch_of(kind, number) for number in range(STEPS)], make=sgd, num=NUM)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(kind, config):
    loss_fn = square if kind == "sequence" else None
    engine = zeroshard.initialize(build(kind), sgd, config, loss_fn=loss_fn).engine
    torch.manual_seed(5)
    for number in range(STEPS):
        engine.train_batch(*batch_of(kind, number))
    with engine.unsharded():
        state = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    engine.close(restore=False)
    return state


def pipelined(schedule, stage=1, **options):
    return {"stage": stage, "pipeline": {"schedule": schedule, "num_microbatches": NUM}, **options}


def require_bits(found, want):
    assert {name for state in found for name in state} == set(want)
    for state in found:
        for name, value in state.items():
            assert torch.equal(value, want[name]), name


def joined(found):
    return {name: value for state in found for name, value in state.items()}


@pytest.mark.parametrize("kind", ["Llama", pytest.param("Mixtral", marks=pytest.mark.long)])
def test_divided_backwards_have_the_bits_of_one_process(ranks, kind):
    """The fuzz draws other models and schedules, within the rounding of float64."""
    found = ranks(2, trained, kind, pipelined("zbv", 3, mesh={"pp": 2}))
    require_bits(found, *ranks(1, plain, kind))


def test_divided_backwards_draw_no_random_numbers(ranks):
    want, found = (
        ranks(2, trained, "sequence", pipelined(name, 3, mesh={"pp": 2})) for name in ("1f1b", "zb-h1")
    )
    require_bits(found, joined(want))


def num_waiting(mesh):
    """The products of a batch whose weight gradients wait on this rank."""
    noted, note = [], Waiting.note
    Waiting.note = lambda self, *args: noted.append(args) or note(self, *args)
    try:
        trained("Llama", pipelined("zb-h1", mesh=mesh))
    finally:
        Waiting.note = note
    return len(noted) / (STEPS * NUM)


def test_the_weight_gradients_of_all_linear_layers_wait(ranks):
    assert ranks(2, num_waiting, {"pp": 2}) == [2 * 7, 2 * 7 + 1]
