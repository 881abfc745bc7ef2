"""Parametrized and pruned layers, attributes of parameters, autocast; derivatives; tracers are refused."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.functional as functional
import torch.distributed as dist
import torch.func
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, prune

import zeroshard
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
    train,
    train_replicated,
    train_sharded,
    unlike,
)
from tests.ranks import on_ranks


class Lower(nn.Module):
    def forward(self, weight):
        return weight.tril()


def base():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2))
    return nn.Sequential(nn.Linear(7, 7), *blocks, nn.Linear(7, 3))


REPARAMETRIZE = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Lower()),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.4),
    "old weight_norm": nn.utils.weight_norm,
}


@on_ranks(2)
def test_layers_reparametrized_before_initialize_train_as_in_plain_pytorch():
    warnings.simplefilter("ignore")
    found = []
    for name, change in REPARAMETRIZE.items():
        models = base(), base()
        for model in models:
            for layer in (model[0], model[1][0], model[2][2]):
                change(layer)
        models[1].load_state_dict(models[0].state_dict())
        own = made_by("SGD", models[1])
        want = finish(models[1], [averaged_step(models[1], own, square_loss, number) for number in range(2)])
        got = train(*start(models[0], "SGD", stage=3), 2, square_loss)
        kept = {key: value for key, value in got.parameters.items() if not key.endswith(("_u", "_v"))}
        got.parameters = kept  # each rank's own power iterations
        found += apart(name, got, want)
    return found


@on_ranks(2)
def test_a_model_that_is_changed_under_unsharded_is_refused_by_name():
    replaced = r"'0\.weight' was replaced, tied or removed|Creating a Parameter"  # torch's, of weight_norm
    for name, change in REPARAMETRIZE.items():
        engine, _ = start(base(), stage=3)
        with pytest.raises(RuntimeError, match=replaced), engine.unsharded():
            change(engine.module[0])
        if name != "weight_norm":  # torch refuses it before anything is changed
            with pytest.raises(RuntimeError, match=replaced):
                engine(numbers(0, 5, 7))
    prune.l1_unstructured((pruned := base())[0], "weight", 0.4)
    engine, _ = start(pruned, stage=3)
    gone = pytest.raises(RuntimeError, match=r"'0\.weight_orig' was replaced, tied or removed")
    with gone, engine.unsharded():
        prune.remove(engine.module[0], "weight")
    engine, _ = start(base(), stage=3)
    added = pytest.raises(RuntimeError, match=r"'4\.weight' was added to a sharded model.* \(rank 1\)")
    with added, engine.unsharded(write_back=True):
        if dist.get_rank() == 1:
            engine.module.append(nn.Linear(3, 3))


@on_ranks(2)
def test_attributes_of_parameters_are_seen_before_and_after_initialize_and_in_forward():
    model, seen = base(), []
    for name, parameter in model.named_parameters():
        parameter.tag = name

    def note(parameters):
        seen.append([parameter.tag for parameter in parameters])

    def factory(parameters):
        note(parameters := list(parameters))
        return torch.optim.SGD(parameters, lr=0.1)

    engine, *_ = zeroshard.initialize(model, factory, {"stage": 3})
    for layer in (each for each in model.modules() if isinstance(each, nn.Linear)):
        layer.register_forward_pre_hook(lambda module, _: note(module.parameters()))
    engine(numbers(0, 5, 7))
    with engine.unsharded():
        note(engine.module.parameters())
    note(engine.parameters())
    names = [name for name, _ in base().named_parameters()]
    assert [seen[0], list(itertools.chain(*seen[1:-2])), *seen[-2:]] == [names] * 4


def autocast_loss(outside, model, number):
    """Two micro-batches; a context around all steps caches the casts of parameters to its end."""
    with nullcontext() if outside else torch.autocast("cpu", torch.bfloat16):
        return sum(model(numbers(number + n, 5, 7)).float().square().mean() for n in (0, 50))


@on_ranks(2)
def test_casts_that_autocast_caches_are_not_used_after_a_step():
    want = train_replicated(base(), "SGD", 3, partial(autocast_loss, False), averages=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = train_sharded(base(), "SGD", 3, partial(autocast_loss, True), stage=3)
    return apart("autocast", got, want)


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
