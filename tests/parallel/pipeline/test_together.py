"""Pipelines in float16, and with gradients that are not finite; the fuzz has optimizers and tiers."""

import copy
import functools
import math
import re

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import adamw, start, train
from tests.ranks import on_ranks

PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "num_microbatches": 2}}


# --------------------------------------------------------------------------------------- float16


@on_ranks(2)
def test_all_ranks_name_the_gradients_that_are_not_finite():
    first, last = "transformer.h.0.ln_1.weight", "transformer.ln_f.bias"
    for bad in ([last], [first, last]):
        engine = start("tied gpt", {"nonfinite": "error", "stage": 3} | PIPELINE, adamw)
        for name, parameter in engine.module.named_parameters():
            if name in bad:
                parameter.register_hook(lambda gradient: gradient * math.nan)
        text = f"not finite are the gradients of {', '.join(map(repr, bad))}. The step was "
        with pytest.raises(RuntimeError, match=re.escape(text)):
            train(engine, [0])
        assert engine.global_step == 0
        engine.close(restore=False)


@on_ranks(2)
def test_all_pipeline_ranks_scale_the_loss_if_one_has_float16():
    """Changes of parameters in a step, over those of plain PyTorch; one pipeline rank has no float16."""

    def loss_of(outputs, targets):
        return (outputs.float() - targets).square().mean()

    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    inputs, targets = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(1, -1, 32).view(4, 8)
    for split, overrides in (("3", {}), ("2", {"0": "float32"}), ("2", {"2": "float32"})):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus())
        model = copy.deepcopy(plain)
        precision = {"param_dtype": "float16", "loss_scale": 1024.0, "overrides": overrides}
        pipeline = {"num_microbatches": 2, "split": [split]}
        config = {"watchdog_s": 20.0, "mesh": {"pp": 2}, "pipeline": pipeline, "precision": precision}
        engine = zeroshard.initialize(model, optimizer, config, loss_fn=loss_of).engine
        engine.train_batch(inputs, targets)
        loss_of(plain(inputs), targets).backward()
        for name, parameter in plain.named_parameters():
            change = engine.full_parameter(name) - parameter.detach()
            ratio = (change.norm() / parameter.grad.norm()).item()
            assert ratio == pytest.approx(1.0, rel=1e-2), (split, overrides, name)  # float16 has 11 bits
        engine.close(restore=False)
