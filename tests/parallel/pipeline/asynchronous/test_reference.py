"""Every asynchronous method equals a single process that keeps the history of each stage's weights."""

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.asynchronous import histories
from tests.parallel.pipeline.asynchronous.runs import (
    MAKERS,
    METHODS,
    WIDTH,
    batch_of,
    begin,
    compare,
    expected,
    finish,
    method_of,
    runs,
    state_of,
    train,
)

FAST = (
    "pipedream, vertical",
    "2bw",
    "pipemare",
    "spectrain",
    "lwp, weights",
    "lwp, spike",
    "pb, rescale",
    "paci",
)
"""A method for each kind of weights, and each correction."""


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(
    ("names", "num_ranks", "stage", "num"), [(FAST, 2, 3, 7), (METHODS, 4, 0, 14)], ids=["2", "4"]
)
def test_a_method_equals_the_history_of_weights(ranks, names, num_ranks, stage, num):
    """Losses and parameters after a list."""
    num_stages = num_ranks
    methods = {name: method_of(name, num_stages) for name in names}
    cases = [
        ((pipeline, maker, num_stages, (0,), num), {"stage": stage})
        for pipeline, _, maker in methods.values()
    ]
    of_methods = zip(*ranks(num_ranks, runs, *cases, timeout=200), strict=True)
    for (name, (_, method, maker)), found in zip(methods.items(), of_methods, strict=True):
        compare(found, expected(num_stages, method, maker, num=num), name)


def falling(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Tokens(nn.Module):
    """An embedding of one token or another, by the sign of a value."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2, WIDTH)

    def forward(self, x):
        return self.embedding((x > 0).long()).sum(1)


class Sometimes(nn.Module):
    """A layer that is used twice, one that the data chooses, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.chosen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.linear(self.linear(x).tanh())
        return y + self.chosen(x) if x.detach().sum() > 0 else y


def varied(is_first_frozen):
    """Two stages of three blocks; a layer is frozen, or all of the first stage."""
    torch.manual_seed(0)
    linear, frozen, norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(Tokens(), linear, Sometimes(), frozen, norm, nn.Linear(WIDTH, WIDTH)).double()
    linear.weight = model[2].linear.weight
    for part in model[:3] if is_first_frozen else (frozen, norm.bias):
        part.requires_grad_(False)
    return model


def own_rows(engine, number):
    """The rows of a data-parallel rank in each micro-batch."""
    parts = (one.chunk(6) for one in batch_of(number, 6))
    return tuple(torch.cat([p.chunk(engine.dp_world_size)[engine.dp_rank] for p in own]) for own in parts)


def lived(folder, is_first_frozen):
    """A list of two batches, an evaluation, and a list of another engine that goes on at another stage.

    With the averages after the first list.
    """

    def start(stage):
        pipeline = {"schedule": "pipemare", "synchronous_steps": 3, "anneal_steps": 20, "split": ["3"]}
        model = varied(is_first_frozen)
        return begin(pipeline, "adamw", model=model, lr_scheduler=falling, stage=stage)

    engine = start(3)
    averages = zeroshard.EMA(engine, decay=0.5)
    losses = [engine.train_batches([own_rows(engine, number) for number in (0, 1)]).mean().item()]
    with averages.applied():
        averaged = state_of(engine)
    losses.append(engine.eval_batch(*own_rows(engine, 2)).item())
    engine.save_checkpoint(folder, "saved")
    engine.close(restore=False)
    engine = start(0)
    engine.load_checkpoint(folder, "saved")
    return finish(engine, [*losses, *train(engine, [3])]), averaged


def averages_of(stage):
    """In the order of its parameters, after a list whose first update copied."""
    [first, *others] = [version["weights"] for version in stage.history[1:]]
    for weights in others:
        first = [0.5 * a + 0.5 * w for a, w in zip(first, weights, strict=True)]
    return first


@pytest.mark.parametrize("is_first_frozen", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_happens_around_lists_is_in_the_history(ranks, tmp_path, is_first_frozen):
    """Two data-parallel ranks, three synchronous steps at first, and a schedule of the learning rate."""

    def batches(*numbers):
        pieces = [
            list(zip(*(one.chunk(12) for one in batch_of(number, 6)), strict=True)) for number in numbers
        ]
        return [[piece for own in pieces for piece in own[place::2]] for place in range(2)]

    model, loss_fn, stages = varied(is_first_frozen), nn.functional.mse_loss, []
    for blocks in (model[:3], model[3:]):
        has_optimizer = any(p.requires_grad for p in blocks.parameters())
        optimizer = MAKERS["adamw"](blocks.parameters()) if has_optimizer else None
        buffers = [[buffer.clone() for buffer in blocks.buffers()] for _ in range(2)]
        stages.append(histories.Stage(blocks, optimizer, optimizer and falling(optimizer), buffers))
    method = histories.Method("estimate", 1, "rescale", anneal_steps=20, synchronous_steps=3)
    first, taken = histories.train_by_history(stages, batches(0, 1), loss_fn, method, 0)
    averages = [*map(averages_of, stages)]
    evaluated = histories.evaluate(stages, batches(2), loss_fn)
    for stage in stages:  # a checkpoint has the buffers of the first data-parallel rank
        stage.buffers[1] = [buffer.clone() for buffer in stage.buffers[0]]
    last, more = histories.train_by_history(stages, batches(3), loss_fn, method, taken)
    found, averaged = zip(*ranks(4, lived, str(tmp_path), is_first_frozen), strict=True)
    mean = [sum(losses) / 4 for losses in zip(*(one.losses for one in found), strict=True)]
    want = [first, evaluated, last], dict(model.named_parameters()), taken + more
    compare([one._replace(losses=mean) for one in found], want)
    for number, state in enumerate(averaged):
        for value, average in zip(state.values(), averages[number // 2], strict=True):
            torch.testing.assert_close(value, average, rtol=0, atol=1e-12)
