"""Pipelines together with precisions, tiers, 8-bit states, hybrid sharding, recomputation, schedules."""

import copy
import functools
import math
import warnings

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import adamw, agree, plain, run, start, train
from zeroshard.optim import Muon
from zeroshard.stepping.wholes import whole_shape

TIED = {"transformer.wte.weight", "model.embed_tokens.weight", "lm_head.weight"}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "num_microbatches": 2}}


def require_one_tied_weight(found):
    tied = [state[key] for *_, state in found for key in TIED & state.keys()]
    assert all(torch.equal(tied[0], other) for other in tied)


# --------------------------------------------------------------------------------------- float16


def with_bad_gradients(bad, config):
    """The message about gradients that are nan, of some parameters alone."""
    engine = start("tied gpt", config | PIPELINE, adamw)
    for name, parameter in engine.module.named_parameters():
        if name in bad:
            parameter.register_hook(lambda gradient: gradient * math.nan)
    told = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(engine, [0])
        except RuntimeError as error:
            told = str(error)
    steps = engine.global_step
    engine.close(restore=False)
    return told + "".join(str(one.message) for one in caught), steps


@pytest.mark.long_where(config=[{"precision": {"param_dtype": "fp16", "loss_scale": 8.0}}])
@pytest.mark.parametrize(
    "config", [{"nonfinite": "error"}, {"precision": {"param_dtype": "fp16", "loss_scale": 8.0}}]
)
def test_all_ranks_name_the_gradients_that_are_not_finite(ranks, config):
    first, tied, last = "transformer.h.0.ln_1.weight", "transformer.wte.weight", "transformer.ln_f.bias"
    for bad in ([last], [first, tied, last]):
        names = ", ".join(map(repr, sorted(bad, key=[tied, first, last].index)))
        for told, steps in ranks(4, with_bad_gradients, bad, config | {"stage": 3}):
            assert f"not finite are the gradients of {names}. The step was " in told
            assert steps == 0


def step_without_half_on_a_rank(split, overrides):
    """Changes of parameters in a step, over those of plain PyTorch; one pipeline rank has no float16."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus())
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    model = copy.deepcopy(plain)
    config = {
        "watchdog_s": 20.0,
        "mesh": {"pp": 2},
        "pipeline": {"num_microbatches": 2, "split": [split]},
        "precision": {"param_dtype": "float16", "loss_scale": 1024.0, "overrides": overrides},
    }

    def loss_of(outputs, targets):
        return (outputs.float() - targets).square().mean()

    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    engine = zeroshard.initialize(model, optimizer, config, loss_fn=loss_of).engine
    inputs, targets = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(1, -1, 32).view(4, 8)
    engine.train_batch(inputs, targets)
    loss_of(plain(inputs), targets).backward()
    return [
        ((engine.full_parameter(name) - before[name]).norm() / parameter.grad.norm()).item()
        for name, parameter in plain.named_parameters()
    ]


@pytest.mark.parametrize(
    ("split", "overrides"), [("3", {}), ("2", {"0": "float32"}), ("2", {"2": "float32"})]
)
def test_all_pipeline_ranks_scale_the_loss_if_one_has_float16(ranks, split, overrides):
    for ratios in ranks(2, step_without_half_on_a_rank, split, overrides):
        assert ratios == pytest.approx([1.0] * 4, rel=1e-2)  # float16 has 11 bits


# --------------------------------------------------------------------------------------- whole tensors


def muon(parameters):
    matrices, others = [], []
    for parameter in parameters:
        (matrices if len(whole_shape(parameter)) == 2 else others).append(parameter)
    return Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-2, ns_steps=1)


def test_each_holder_of_a_tied_weight_steps_it_by_the_whole(ranks):
    found = ranks(4, run, "tied llama", PIPELINE | {"stage": 3}, range(3), muon)
    require_one_tied_weight(found)
    losses, _, want = plain("tied llama", range(3), make=muon)
    # Muon iterates in bfloat16.
    agree([(own, [], state) for own, _, state in found], (losses, [], want), rel=1e-5, absolute=3e-3)
