"""Runs of small asynchronous pipelines, and the same in one process with `histories.py`."""

import copy
import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.training import part_of
from tests.parallel.pipeline.asynchronous.histories import Method, Stage, train_by_history
from tests.parallel.pipeline.runs import pair_of
from zeroshard.optim import AdamW8bit

WIDTH, ROWS = 6, 4


def model_of(num_stages):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        )
        for _ in range(2 * num_stages)
    ]
    return nn.Sequential(*blocks).double()


def batch_of(number, num):
    return pair_of(num * ROWS, WIDTH, number)


def square_loss(output, target):
    """mse_loss of torch 2.11 has no backward for operands of two dtypes."""
    return (output.float() - target).square().mean()


sgd = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.8, weight_decay=0.01)
MAKERS = {
    "sgd": sgd,
    "plain sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "heavy": functools.partial(torch.optim.SGD, lr=0.1, momentum=1.0),
    "adamw": functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=3e-3),
    "adamw 8-bit": functools.partial(AdamW8bit, lr=3e-3, min_8bit_size=0),
    "lion": functools.partial(zeroshard.optim.Lion8bit, lr=1e-3),
}


# ------------------------------------------------------------------------------------------- the ranks


def begin(pipeline, maker="sgd", num_stages=2, model=None, lr_scheduler=None, **config):
    balance = {} if "split" in pipeline else {"balance": "memory"}
    pipeline = {"num_microbatches": 6, **balance, **pipeline}
    config = {"mesh": {"pp": num_stages}, "pipeline": pipeline, **config}
    model = model_of(num_stages) if model is None else model
    make = MAKERS[maker] if isinstance(maker, str) else maker
    is_wide = all(parameter.dtype == torch.float64 for parameter in model.parameters())
    loss_fn = nn.functional.mse_loss if is_wide else square_loss
    return zeroshard.initialize(model, make, config, loss_fn=loss_fn, lr_scheduler=lr_scheduler).engine


def train(engine, numbers, num=6, dtype=torch.float64):
    """Each data-parallel rank takes its rows of every micro-batch."""
    losses = []
    for number in numbers:
        own = [
            torch.cat([part_of(engine, one) for one in value.to(dtype).chunk(num)])
            for value in batch_of(number, num)
        ]
        losses.append(engine.train_batch(*own).item())
    return losses


def state_of(engine):
    with engine.unsharded():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


class Run(NamedTuple):
    losses: list[float]
    state: dict[str, torch.Tensor]
    steps: int
    peak_versions: int
    size: int
    """The elements of the main parameters of this rank."""


def finish(engine, losses):
    size = sum(buffer.main.numel() for buffer in engine._runtime.buffers)
    found = Run(losses, state_of(engine), engine.global_step, engine.memory_report().peak_versions, size)
    engine.close(restore=False)
    return found


def run(pipeline, maker="sgd", num_stages=2, numbers=(0, 1), num=6, model=None, **config):
    """Train lists of `num` micro-batches."""
    model = model_of(num_stages) if model is None else copy.deepcopy(model)  # an engine takes it apart
    dtype = next(model.parameters()).dtype
    engine = begin({"num_microbatches": num, **pipeline}, maker, num_stages, model, **config)
    engine.reset_memory_report()
    return finish(engine, train(engine, numbers, num, dtype))


def runs(*cases):
    """Several runs, each of (arguments, keyword arguments)."""
    return [run(*arguments, **keywords) for arguments, keywords in cases]


def assert_same(found, want, case=""):
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(value, found[name]), (case, name)


# ------------------------------------------------------------------------------------- the one process


def stages_of(model, maker):
    num = len(model) // 2
    blocks = [nn.Sequential(*list(model)[2 * s : 2 * s + 2]) for s in range(num)]
    return [Stage(one, MAKERS[maker](one.parameters()), None, [[]]) for one in blocks]


def expected(num_stages, method, maker, numbers=(0,), num=30):
    """Losses, parameters and steps."""
    model, losses, taken = model_of(num_stages), [], 0
    stages = stages_of(model, maker)
    for number in numbers:
        batch = list(zip(*(value.chunk(num) for value in batch_of(number, num)), strict=True))
        loss, steps = train_by_history(stages, [batch], nn.functional.mse_loss, method, taken)
        losses.append(loss)
        taken += steps
    return losses, dict(model.named_parameters()), taken


def compare(found, want, case=""):
    """Gradients of several data-parallel ranks are added up in another order, which is 1e-16 of a value."""
    want_losses, parameters, steps = want
    names = set()
    for losses, state, taken, *_ in found:
        assert taken == steps, case
        assert losses == pytest.approx(want_losses, rel=1e-6), case  # the mean is in float32
        names |= state.keys()
        for name, value in state.items():
            torch.testing.assert_close(
                value, parameters[name].detach(), rtol=0, atol=1e-12, msg=f"{case}: {name}"
            )
    assert names == parameters.keys()


MARE = Method("estimate", 1, "rescale")
METHODS = {
    "pb": ({}, Method("latest", 1), "sgd"),
    "pipedream": ({}, Method("stash", 1), "sgd"),
    "pipedream, vertical": ({"weights": "vertical"}, Method("vertical", 1), "sgd"),
    "2bw": ({}, Method("double", 0), "sgd"),
    "pipemare": ({"anneal_steps": 20, "decay": 0.3}, replace(MARE, anneal_steps=20, decay=0.3), "sgd"),
    "pipemare, adamw": ({}, MARE, "adamw"),
    "spectrain": ({}, Method("predict", 1), "sgd"),
    "spectrain, adam": ({}, Method("predict", 1), "adam"),
    "lwp": ({}, Method("lwp", 1), "sgd"),
    "lwp, adamw": ({}, Method("lwp", 1), "adamw"),
    "lwp, weights": ({"weights": "lwp-weights"}, Method("lwp-weights", 1), "adamw"),
    "lwp, spike": ({"correction": "spike"}, Method("lwp", 1, "spike"), "sgd"),
    "pb, spike": ({"correction": "spike"}, Method("latest", 1, "spike"), "sgd"),
    "pb, rescale": ({"correction": "rescale"}, Method("latest", 1, "rescale"), "adamw"),
    "paci": ({"max_crossed_steps": 2}, Method("bounded", -1), "sgd"),
    "pipedream, 2 per step": ({"microbatches_per_step": 2}, Method("stash", 2), "adamw"),
    "spectrain, 4 per step": ({"microbatches_per_step": 4}, Method("predict", 4), "sgd"),
}  # fmt: skip
"""The config of a pipeline, the method and the optimizer, by the schedule and what is set besides."""


def method_of(name, num_stages):
    """The config of a pipeline, the method at this depth and the optimizer."""
    pipeline, method, maker = METHODS[name]
    if method.per_step < 1:  # 2bw has a step in p micro-batches; of paci, two steps may be crossed
        per_step = num_stages if method.weights == "double" else max(1, -(-(num_stages - 1) // 2))
        method = replace(method, per_step=per_step)
    return {"schedule": name.partition(",")[0], **pipeline}, method, maker
