"""Optimizers over sharded parameters: two ranks, against DDP to the bit.

An element-wise update of a slice that starts on a block gives the bits of the whole tensor's.
"""

import copy

import pytest
import torch
from torch import nn

from tests.distributed.models import Tiny
from tests.distributed.training import (
    SOME_STAGES,
    build,
    differences,
    replicate,
    square_loss,
    start,
    train,
)
from tests.ranks import on_ranks

ELEMENT_WISE = [
    ("ASGD", {}),
    ("Adadelta", {"lr": 0.3}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("Adam", {"foreach": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"fused": True}),
    ("Adagrad", {"fused": True}),
]


FAST = 9
"""The first ones: each class once, but for those that the fuzz draws."""


@pytest.mark.parametrize(
    "kinds", [ELEMENT_WISE[:FAST], pytest.param(ELEMENT_WISE[FAST:], marks=pytest.mark.long)], ids=len
)
@on_ranks(2)
def test_every_element_wise_optimizer_of_torch_trains_as_in_ddp_to_the_bit(kinds):
    found = {}
    for name, options in kinds:
        torch.manual_seed(0)
        model = Tiny(3)

        def make(parameters, name=name, options=options):
            return getattr(torch.optim, name)(parameters, **({"lr": 1e-2} | options))

        replica = replicate(model)
        want = train(replica, make(replica.parameters()), 4, square_loss)
        sharded = copy.deepcopy(model)
        got = train(*start(sharded, make(sharded.parameters())), 4, square_loss)
        if lines := differences(name, got, want):
            found[name, str(options)] = lines
    return found


# ------------------------------------------------------------------------------------ groups and schedules


@on_ranks(2)
def test_an_optimizer_may_hold_a_part_of_the_parameters():
    """An optimizer over a part of the parameters leaves the others alone, as in plain PyTorch."""
    found, model = [], build("tied GPT")

    def some(net):
        return torch.optim.AdamW([p for name, p in net.named_parameters() if "blocks" in name], lr=1e-2)

    replica = replicate(model)
    want = train(replica, some(replica), 4)
    for stage in SOME_STAGES:
        sharded = copy.deepcopy(model)
        engine, optimizer = start(sharded, some(sharded), stage=stage)
        found += differences(f"stage {stage}", train(engine, optimizer, 4), want)
    return found


@on_ranks(2)
def test_a_parameter_that_was_added_after_sharding_is_refused_at_the_step():
    engine, optimizer = start(nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]})
    engine(torch.ones(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"group 1 .* shape \[3, 4\], added after the model"):
        optimizer.step()
