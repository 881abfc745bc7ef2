"""Parametrized and pruned layers, attributes of parameters, and autocast."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.nn.utils import parametrizations, prune

import zeroshard
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
    for stage in SOME_STAGES:
        warnings.simplefilter("ignore")
        found = []
        for name, change in REPARAMETRIZE.items():
            model = base()
            for layer in (model[0], model[1][0], model[2][2]):
                change(layer)
            plain = base()
            for layer in (plain[0], plain[1][0], plain[2][2]):
                change(layer)
            plain.load_state_dict(model.state_dict())
            optimizer = sgd(plain)
            engine, own = start(model, sgd(model), stage=stage)
            got = [step(engine, own, square_loss, number) for number in range(2)]
            want = [averaged_step(plain, optimizer, square_loss, number) for number in range(2)]
            got, want = finish(engine, got), finish(plain, want)
            kept = {key: value for key, value in got.parameters.items() if not key.endswith(("_u", "_v"))}
            got.parameters = kept  # each rank's own power iterations
            found += apart(f"stage {stage}, {name}", got, want)
        assert found == []


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


@pytest.mark.parametrize("stage", SOME_STAGES)
@on_ranks(2)
def test_attributes_of_parameters_are_seen_before_and_after_initialize_and_in_forward(stage):
    model = base()
    for name, parameter in model.named_parameters():
        parameter.no_decay = name.endswith("bias")
    model[0].weight.tensor_model_parallel = tag = object()
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.tensor_model_parallel))
    asked = []

    def factory(parameters):
        parameters = list(parameters)
        asked.extend(parameter.no_decay for parameter in parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    engine, *_ = zeroshard.initialize(model, factory, {"stage": stage})
    engine(numbers(0, 5, 7))
    with engine.unsharded():
        seen.append(engine.module[0].weight.tensor_model_parallel)
        shown = [parameter.no_decay for parameter in engine.module.parameters()]
    kept = [parameter.no_decay for parameter in engine.parameters()]
    assert asked == shown == kept
    assert any(kept)
    assert not all(kept)
    assert seen == [tag, tag]


def accumulate_in_autocast(model, optimizer, number, *, averages):
    """Two micro-batches, each with a backward, and a step."""
    losses = []
    for part in range(2):
        loss = model(numbers(number + 50 * part, 5, 7)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    for parameter in model.parameters() if averages else ():
        parameter.grad *= 1 / dist.get_world_size()
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return losses


@on_ranks(2)
def test_casts_that_autocast_caches_are_not_used_after_a_step():
    """Several steps inside one context, which caches the casts of parameters to its end."""
    for stage in SOME_STAGES:
        config = {}
        model = base()
        plain = copy.deepcopy(model)
        optimizer = sgd(plain)
        engine, own = start(model, sgd(model), stage=stage, **config)
        got, want = [], []
        with torch.autocast("cpu", torch.bfloat16):
            for number in range(3):
                got += accumulate_in_autocast(engine, own, number, averages=False)
        for number in range(3):  # a context for each step, as torch advises
            with torch.autocast("cpu", torch.bfloat16):
                want += accumulate_in_autocast(plain, optimizer, number, averages=True)
        found = apart(f"stage {stage}", finish(engine, got), finish(plain, want))
        assert found == []
