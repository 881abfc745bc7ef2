"""Forwards inside transforms of torch.func and inside tracers are refused; backwards through gradients."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.functional as functional
import torch.func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.distributed.models import tiny
from tests.distributed.training import (
    apart,
    averaged_step,
    finish,
    made_by,
    numbers,
    square_loss,
    start,
    step,
    unlike,
)
from tests.ranks import on_ranks


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
TRACED = r"a sharded model cannot be called inside .*\. Trace or transform the model before"
TRANSFORMED = r"cannot be called inside a transform of torch\.func .*create_graph=True"


def inside_a_unit(model):
    """A transform of a unit inside a forward, as models of forces have it."""
    energy = torch.func.grad(lambda row: model.blocks[0](row).square().sum())
    model.forward = lambda x: torch.func.vmap(energy)(model.inner(x))
    try:
        model(numbers(0, 5, 7))
    finally:
        del model.forward


@on_ranks(2)
def test_derivatives_are_those_of_plain_pytorch_tracers_and_transforms_are_refused_and_steps_are_right():
    """All through one engine, with a step after each."""
    model, plain = tiny(), tiny()
    engine, own = start(model, "SGD", stage=3, units=["Sequential"])
    optimizer, losses, want, found = made_by("SGD", plain), [], [], []

    def step_after():
        losses.append(step(engine, own, square_loss, len(losses)))
        want.append(averaged_step(plain, optimizer, square_loss, len(want)))

    for name, derive in DERIVATIVES.items():
        found += unlike(name, derive(engine), derive(plain))
        step_after()
    for calls, text in ((TRACERS, TRACED), ((*TRANSFORMS, inside_a_unit), TRANSFORMED)):
        for call in calls:
            for called in (engine, engine.module)[call is inside_a_unit : 1 if call in TRACERS else 2]:
                with pytest.raises(RuntimeError, match=text):
                    call(called)
            step_after()
    return found + apart("then", finish(engine, losses), finish(plain, want))
