"""Forwards inside transforms of torch.func and inside tracers are refused; backwards through gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.functional as functional
import torch.func
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.distributed.models import tiny
from tests.distributed.training import (
    SOME_STAGES,
    apart,
    averaged_step,
    finish,
    numbers,
    sgd,
    square_loss,
    start,
    step,
    unlike,
)
from tests.ranks import on_ranks

UNITS = {"units": ["Sequential"]}


def dual(model):
    with forward_ad.dual_level():
        made = forward_ad.make_dual(numbers(0, 5, 7), numbers(1, 5, 7))
        return forward_ad.unpack_dual(model(made)).tangent.clone()


TRANSFORMS = (
    lambda model: torch.func.grad(lambda x: model(x).square().mean())(numbers(0, 5, 7)),
    lambda model: torch.func.vjp(lambda x: model(x), numbers(0, 5, 7)),
    lambda model: torch.func.jvp(lambda x: model(x), (numbers(0, 5, 7),), (numbers(1, 5, 7),)),
    lambda model: torch.func.vmap(lambda x: model(x))(numbers(0, 5, 7)),
    lambda model: torch.no_grad()(torch.func.vmap(lambda x: model(x)))(numbers(0, 5, 7)),
    lambda model: torch.func.hessian(lambda x: model(x).sum())(numbers(0, 7)),
    lambda model: torch.func.functionalize(lambda x: model(x))(numbers(0, 5, 7)),
)

DERIVATIVES = {
    "dual tensors": dual,
    "functional.jacobian": lambda model: functional.jacobian(lambda x: model(x), numbers(0, 5, 7)),
    "functional.hessian": lambda model: functional.hessian(lambda x: model(x).sum(), numbers(0, 7)),
    "inference_mode": lambda model: torch.inference_mode()(lambda: model(numbers(0, 5, 7)).clone())(),
}


def shape_of(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(5, 7))


TRACERS = (
    lambda model: torch.func.linearize(lambda x: model(x), numbers(0, 5, 7)),
    lambda model: make_fx(lambda x: model(x))(numbers(0, 5, 7)),
    lambda model: torch.export.export(model, (numbers(0, 5, 7),)),
    lambda model: torch.jit.trace(model, (numbers(0, 5, 7),)),
    torch.fx.symbolic_trace,
    shape_of,
)
REFUSALS = {
    TRACERS: r"a sharded model cannot be called inside .*\. Trace or transform the model before",
    TRANSFORMS: r"cannot be called inside a transform of torch\.func .*create_graph=True",
}


@pytest.mark.long_where(stage=[0, 2])
@pytest.mark.parametrize("stage", SOME_STAGES)
@on_ranks(2)
def test_derivatives_are_those_of_plain_pytorch_and_the_steps_between_them_too(stage):
    """Every derivative through one engine, with a step after each."""
    model, found = tiny(), []
    plain = copy.deepcopy(model)
    optimizer, losses, want = sgd(plain), [], []
    engine, own = start(model, sgd(model), stage=stage, **UNITS)
    for number, (name, derive) in enumerate(DERIVATIVES.items()):
        found += unlike(f"stage {stage}, {name}", derive(engine), derive(plain))
        losses.append(step(engine, own, square_loss, number))
        want.append(averaged_step(plain, optimizer, square_loss, number))
    found = found + apart(f"stage {stage}", finish(engine, losses), finish(plain, want))
    assert found == []


def trace_all(stage, around):
    model = tiny()
    plain = copy.deepcopy(model)
    optimizer, losses, want = sgd(plain), [], []
    engine, own = start(model, sgd(model), stage=stage, **UNITS)
    for number, trace in enumerate(around):
        for called in (engine, engine.module)[: 1 if trace in TRACERS else 2]:
            with pytest.raises(RuntimeError, match=REFUSALS[around]):
                trace(called)
        losses.append(step(engine, own, square_loss, number))
        want.append(averaged_step(plain, optimizer, square_loss, number))
    return apart(f"stage {stage}", finish(engine, losses), finish(plain, want))


@on_ranks(2)
def test_tracers_and_transforms_are_refused_and_the_steps_between_them_are_right():
    for stage in SOME_STAGES:
        for number in range(2):
            found = trace_all(stage, (TRACERS, TRANSFORMS)[number])
            assert found == []


class Energy(nn.Module):
    """Takes gradients of a block inside its forward, as models of forces do."""

    transforms = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x):
        x = self.blocks[0](self.inner(x))
        if not self.transforms:
            return self.blocks[1](x) * self.scale
        forces = torch.func.vmap(torch.func.grad(lambda row: self.blocks[1](row).square().sum()))(x)
        return forces * self.scale


@on_ranks(2)
def test_a_forward_that_transforms_a_unit_inside_is_refused():
    for stage in SOME_STAGES:
        engine, own = start(Energy(), "SGD", stage=stage, **UNITS)
        with pytest.raises(RuntimeError, match=REFUSALS[TRANSFORMS]):
            square_loss(engine, 0)
        engine.module.transforms = False
        assert step(engine, own, square_loss, 0) > 0
