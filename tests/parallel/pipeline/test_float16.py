"""The loss scale of float16 over pipeline ranks, of which one has no parameter in float16."""

import copy
import functools

import pytest
import torch
from torch import nn

import zeroshard


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
