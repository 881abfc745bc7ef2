"""Every asynchronous method equals a single process that keeps the history of each stage's weights.

That process reads nothing from a schedule, and shares nothing with the package.

Losses and parameters after 30 micro-batches agree within 1e-12 in float64: gradients of several
data-parallel ranks are added up in another order, which is 1e-16 of a value.
"""

import functools

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.asynchronous import reference

WIDTH, ROWS, MICRO_BATCHES = 6, 4, 30


def model_of(num_ranks):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        )
        for _ in range(2 * num_ranks)
    ]
    return nn.Sequential(*blocks).double()


def batch_of(number, num=MICRO_BATCHES):
    generator = torch.Generator().manual_seed(number)
    shape = num * ROWS, WIDTH
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.8, weight_decay=0.01)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=3e-3)


MAKERS = {"sgd": sgd, "adamw": adamw, "adam": adam}


def over_ranks(num_stages, pipeline, maker, stage, numbers=(0,), num=MICRO_BATCHES, **config):
    pipeline = {"num_microbatches": num, "balance": "memory", **pipeline}
    config = {"stage": stage, "mesh": {"pp": num_stages}, "pipeline": pipeline, **config}
    engine = zeroshard.initialize(
        model_of(num_stages), MAKERS[maker], config, loss_fn=nn.functional.mse_loss
    ).engine
    losses = []
    for number in numbers:
        inputs, targets = batch_of(number, num)
        # Each data-parallel rank takes its rows of every micro-batch.
        own = [
            torch.cat([piece.chunk(engine.dp_world_size)[engine.dp_rank] for piece in value.chunk(num)])
            for value in (inputs, targets)
        ]
        losses.append(engine.train_batch(*own).item())
    with engine.unsharded():
        state = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    steps = engine.global_step
    engine.close(restore=False)
    return losses, state, steps


def expected(num_stages, method, k, maker, numbers=(0,), num=MICRO_BATCHES):
    model, make = model_of(num_stages), MAKERS[maker]
    blocks = list(model)
    stages = [reference.Stage(blocks[2 * s : 2 * s + 2], make) for s in range(num_stages)]
    losses, taken = [], 0
    for number in numbers:
        inputs, targets = batch_of(number, num)
        batch = list(zip(inputs.chunk(num), targets.chunk(num), strict=True))
        found = reference.train(stages, batch, nn.functional.mse_loss, k, method | {"taken": taken})
        losses.append(sum(found) / len(found))
        taken += -(-num // k)
    return losses, dict(model.named_parameters()), taken


def compare(found, want):
    want_losses, parameters, steps = want
    names = set()
    for losses, state, taken in found:
        assert taken == steps
        assert losses == pytest.approx(want_losses, rel=1e-6)  # the mean is taken in float32
        names |= state.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, parameters[name].detach(), rtol=0, atol=1e-12, msg=name)
    assert names == parameters.keys()


METHODS = {
    "pb": ({"schedule": "pb"}, {"weights": "latest"}, 1, "sgd"),
    "pipedream": ({"schedule": "pipedream"}, {"weights": "stash"}, 1, "sgd"),
    "vertical": ({"schedule": "pipedream", "weights": "vertical"}, {"weights": "vertical"}, 1, "sgd"),
    "2bw": ({"schedule": "2bw"}, {"weights": "double"}, None, "sgd"),
    "pipemare": (
        {"schedule": "pipemare", "anneal_steps": 20, "decay": 0.3},
        {"weights": "estimate", "correction": "rescale", "anneal": 20, "d": 0.3},
        1,
        "sgd",
    ),
    "pipemare, adamw": (
        {"schedule": "pipemare"},
        {"weights": "estimate", "correction": "rescale"},
        1,
        "adamw",
    ),
    "spectrain": ({"schedule": "spectrain"}, {"weights": "predict"}, 1, "sgd"),
    "spectrain, adam": ({"schedule": "spectrain"}, {"weights": "predict"}, 1, "adam"),
    "lwp": ({"schedule": "lwp"}, {"weights": "lwp"}, 1, "sgd"),
    "lwp, adamw": ({"schedule": "lwp"}, {"weights": "lwp"}, 1, "adamw"),
    "lwp-weights": ({"schedule": "lwp", "weights": "lwp-weights"}, {"weights": "lwp-weights"}, 1, "adamw"),
    "lwp, spike": (
        {"schedule": "lwp", "correction": "spike"},
        {"weights": "lwp", "correction": "spike"},
        1,
        "sgd",
    ),
    "pb, spike": (
        {"schedule": "pb", "correction": "spike"},
        {"weights": "latest", "correction": "spike"},
        1,
        "sgd",
    ),
    "pb, rescale": (
        {"schedule": "pb", "correction": "rescale"},
        {"weights": "latest", "correction": "rescale"},
        1,
        "adamw",
    ),
    "paci": ({"schedule": "paci", "max_crossed_steps": 2}, {"weights": "bounded"}, 0, "sgd"),
    "pipedream, 2 per step": (
        {"schedule": "pipedream", "microbatches_per_step": 2},
        {"weights": "stash"},
        2,
        "adamw",
    ),
    "spectrain, 4 per step": (
        {"schedule": "spectrain", "microbatches_per_step": 4},  # the last step has 2 of 30
        {"weights": "predict"},
        4,
        "sgd",
    ),
}


@functools.lru_cache
def expected_of(name, num_stages):
    _, method, k, maker = METHODS[name]
    if k is None:
        k = num_stages
    elif k == 0:  # two steps may be crossed
        k = max(1, -(-(num_stages - 1) // 2))
    return expected(num_stages, method, k, maker)


OTHERS = sorted(METHODS.keys() - {"pipedream", "lwp, spike"})
"""Methods that a few ranks test as well; the fast selection runs them at 2 ranks."""


@pytest.mark.long_where(name=["pipemare, adamw", "pipedream, 2 per step", "lwp, adamw", "spectrain, adam"])
@pytest.mark.long_where(stage=[1, 2])
@pytest.mark.long_where(stage=[0], num_ranks=[4])
@pytest.mark.long_where(stage=[0], name=[*OTHERS, "lwp, spike"])
@pytest.mark.long_where(num_ranks=[3])
@pytest.mark.long_where(num_ranks=[4], num_stages=[2])
@pytest.mark.long_where(num_ranks=[4], name=OTHERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 2), (3, 3), (4, 4), (4, 2)])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_equals_the_history_of_weights(ranks, name, num_ranks, num_stages, stage):
    pipeline, _, _, maker = METHODS[name]
    found = ranks(num_ranks, over_ranks, num_stages, pipeline, maker, stage)
    compare(found, expected_of(name, num_stages))
