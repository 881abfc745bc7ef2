"""Parametrized and pruned layers, attributes of parameters, and autocast."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.nn.utils import parametrizations, prune

import zeroshard
from tests.distributed.training import (
    apart,
    averaged_step,
    finish,
    made_by,
    numbers,
    square_loss,
    start,
    train,
    train_replicated,
    train_sharded,
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
    "pruned rows": lambda layer: prune.ln_structured(layer, "weight", 0.3, n=2, dim=0),
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
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
