"""Every asynchronous method equals a single process that keeps the history of each stage's weights."""

import pytest
import torch

from tests.parallel.pipeline.asynchronous import histories
from tests.parallel.pipeline.asynchronous.runs import (
    METHODS,
    batch_of,
    begin,
    compare,
    expected,
    finish,
    method_of,
    model_of,
    runs,
    stages_of,
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
@pytest.mark.parametrize(("names", "num_ranks", "stage"), [(FAST, 2, 3), (METHODS, 4, 0)], ids=["2", "4"])
def test_a_method_equals_the_history_of_weights(ranks, names, num_ranks, stage):
    """Losses and parameters after 14 micro-batches."""
    num_stages = num_ranks
    methods = {name: method_of(name, num_stages) for name in names}
    cases = [
        ((pipeline, maker, num_stages, (0,), 14), {"stage": stage}) for pipeline, _, maker in methods.values()
    ]
    of_methods = zip(*ranks(num_ranks, runs, *cases, timeout=200), strict=True)
    for (name, (_, method, maker)), found in zip(methods.items(), of_methods, strict=True):
        compare(found, expected(num_stages, method, maker, num=14), name)


def falling(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def own_rows(engine, number):
    """The rows of a data-parallel rank in each micro-batch."""
    parts = (one.chunk(6) for one in batch_of(number, 6))
    return tuple(torch.cat([p.chunk(engine.dp_world_size)[engine.dp_rank] for p in own]) for own in parts)


def lived(folder):
    """A list of two batches, an evaluation, and a list of another engine that goes on at another stage."""
    pipeline = {"schedule": "pipemare", "synchronous_steps": 3, "anneal_steps": 20}
    engine = begin(pipeline, "adamw", lr_scheduler=falling, stage=3)
    losses = [engine.train_batches([own_rows(engine, number) for number in (0, 1)]).mean().item()]
    losses.append(engine.eval_batch(*own_rows(engine, 2)).item())
    engine.save_checkpoint(folder, "saved")
    engine.close(restore=False)
    engine = begin(pipeline, "adamw", lr_scheduler=falling, stage=0)
    engine.load_checkpoint(folder, "saved")
    return finish(engine, [*losses, *train(engine, [3])])


def test_lists_of_batches_evaluations_and_checkpoints_between_them_are_in_the_history(ranks, tmp_path):
    """Two data-parallel ranks, three synchronous steps at first, and a schedule of the learning rate."""

    def batches(*numbers):
        pieces = [
            list(zip(*(one.chunk(12) for one in batch_of(number, 6)), strict=True)) for number in numbers
        ]
        return [[piece for own in pieces for piece in own[place::2]] for place in range(2)]

    model, loss_fn = model_of(2), torch.nn.functional.mse_loss
    stages = stages_of(model, "adamw")
    for stage in stages:
        stage.scheduler, stage.buffers = falling(stage.optimizer), [[], []]
    method = histories.Method("estimate", 1, "rescale", anneal_steps=20, synchronous_steps=3)
    first, taken = histories.train(stages, batches(0, 1), loss_fn, method, 0)
    evaluated = histories.evaluate(stages, batches(2), loss_fn)
    last, more = histories.train(stages, batches(3), loss_fn, method, taken)
    found = ranks(4, lived, str(tmp_path))
    mean = [sum(losses) / 4 for losses in zip(*(one.losses for one in found), strict=True)]
    want = [first, evaluated, last], dict(model.named_parameters()), taken + more
    compare([one._replace(losses=mean) for one in found], want)
