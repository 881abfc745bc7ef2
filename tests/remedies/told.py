"""Errors and warnings that name a remedy, and training that follows it beside plain PyTorch.

Each test provokes an error with `told`, which holds the words of the remedy, and follows it on the next
lines. Numbers are those of plain PyTorch.
"""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import different, seeded

DATA = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))


def told(words, kind=(ValueError, RuntimeError)):
    """Expects an error with these words, which are the remedy."""
    return pytest.raises(kind, match=re.escape(words))


def warned(words):
    return pytest.warns(UserWarning, match=re.escape(words))


net = partial(seeded, Tiny)


def adamw(parameters, **options):
    return AdamW(parameters, lr=1e-2, **options)


def loss_of(model, data=DATA):
    return model(data).square().mean()


def start(model=None, optimizer=adamw, loss_fn=None, **config):
    """An engine over `Tiny` with AdamW."""
    model = net() if model is None else model
    return zeroshard.initialize(model, optimizer, config, loss_fn=loss_fn).engine


def whole(engine):
    return {name: value.clone() for name, value in engine.full_state_dict().items()}


def trained(model=None, optimizer=adamw, losses=(loss_of,)):
    """The state of a model of plain PyTorch after a step with each of these losses."""
    model = net() if model is None else model
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    for loss in losses:
        loss(model).backward()
        made.step()
        made.zero_grad()
    return model.state_dict()


def same(got, want):
    """Bits are equal on the rank that has whole values."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    assert different(got, want) == []


def take_step(engine, loss=loss_of):
    engine.backward(loss(engine))
    engine.step()


def trains(engine, model=None, **options):
    """A step of the engine is that of plain PyTorch from the same weights."""
    take_step(engine, options.get("losses", (loss_of,))[0])
    same(whole(engine), trained(model, **options))
