"""The numbers of zeroshard are those of DistributedDataParallel, and on one rank of plain PyTorch.

To the bit where the order of all additions is the same: fp32 on one or two ranks, and between stages
always. A step whose numbers differ shows in the loss of the next one, so four steps tell most; the long cases
take twenty. With three or more ranks DDP adds in another order, so a sum can differ by a rounding or two;
twenty steps of SGD keep that below 5e-6 of a parameter's norm. AdamW divides by the root of the second moment
and so amplifies a rounding where a gradient is all but zero: 5e-5 over all parameters together.
"""

import copy

import pytest
import torch
from torch import nn

from tests.distributed.models import Tiny
from tests.distributed.training import (
    ALL_STAGES,
    OPTIMIZERS,
    build,
    differences,
    distance_of_all,
    distances,
    flat_gradients,
    full_gradients,
    replicate,
    same_as_replicated,
    square_loss,
    start,
    token_loss,
    train_replicated,
    train_sharded,
)
from tests.ranks import on_ranks


def against_replicated(kinds, optimizers, num_steps):
    found = []
    for kind in kinds:
        for optimizer in optimizers:
            model = build(kind)
            found += [f"{kind}: {line}" for line in same_as_replicated(model, optimizer, num_steps)]
    return found


TWENTY = pytest.param(20, marks=pytest.mark.long)


@pytest.mark.parametrize("num_steps", [4, TWENTY])
@on_ranks(2, timeout=200)
def test_steps_on_two_ranks_equal_those_of_ddp_to_the_bit_at_every_stage(num_steps):
    found = against_replicated(["GPT", "Llama", "tied transformers Llama"], ["AdamW"], num_steps)
    return found + against_replicated(["tied GPT"], ["fused AdamW", "SGD"], num_steps)


@on_ranks(1)
def test_steps_on_one_rank_equal_those_of_plain_pytorch_to_the_bit():
    found = against_replicated(["tied GPT"], ["AdamW"], 4)
    return found + against_replicated(["Llama"], ["fused AdamW", "SGD"], 4)


# ------------------------------------------------------------------------------------ three or more ranks


def first_gradients(model, stage):
    """(of zeroshard, of DDP)"""
    replica = replicate(model)
    token_loss(replica, 0).backward()
    engine, _ = start(copy.deepcopy(model), "SGD", stage=stage)
    token_loss(engine, 0).backward()
    return full_gradients(engine), flat_gradients(replica)


def on_many_ranks(kind, num_steps):
    """By optimizer: where stages differ, and how far they are from DDP."""
    model, found = build(kind), {}
    found["gradients"] = max(distances(*first_gradients(model, 3)).values())
    for optimizer in ("SGD", "AdamW"):
        want = train_replicated(model, optimizer, num_steps)
        runs = {s: train_sharded(model, optimizer, num_steps, stage=s) for s in ALL_STAGES}
        found[f"{optimizer}: stages"] = [
            line for stage in ALL_STAGES for line in differences(f"stage {stage}", runs[stage], runs[3])
        ]
        pairs = zip(runs[3].losses, want.losses, strict=True)
        found[f"{optimizer}: losses"] = max(abs(a - b) / abs(b) for a, b in pairs)
        if runs[3].parameters:
            found[f"{optimizer}: each"] = max(distances(runs[3].parameters, want.parameters).values())
            found[f"{optimizer}: all"] = distance_of_all(runs[3].parameters, want.parameters)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "kind"), [(3, "tied GPT"), (4, "Llama")])
def test_on_more_ranks_stages_agree_to_the_bit_and_stay_close_to_ddp(ranks, num_ranks, kind):
    results = ranks(num_ranks, on_many_ranks, kind, 20, timeout=200)
    for result in results:
        assert result["gradients"] <= 1e-6
        for optimizer in ("SGD", "AdamW"):
            assert result[f"{optimizer}: stages"] == []
            assert result[f"{optimizer}: losses"] <= 1e-6
    assert results[0]["SGD: each"] <= 5e-6
    assert results[0]["AdamW: all"] <= 5e-5


@on_ranks(2, pytest.param(3, marks=pytest.mark.long), timeout=120)
def test_stages_agree_to_the_bit_in_bf16():
    model, precision = build("tied GPT"), {"param_dtype": "bf16"}
    runs = [train_sharded(model, "AdamW", 6, stage=s, precision=precision) for s in ALL_STAGES]
    return [line for stage in ALL_STAGES for line in differences(f"stage {stage}", runs[stage], runs[0])]


# ------------------------------------------------------------------------------------------- small shapes


class OneElement(nn.Module):
    """One parameter, and of it one element."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((), 1.5))

    def forward(self, x):
        return x * self.factor


@on_ranks(2)
def test_parameters_of_one_element_train_as_in_ddp_to_the_bit():
    torch.manual_seed(0)
    models = [Tiny(1), Tiny(3), OneElement(), nn.Sequential(nn.Linear(7, 1))]
    return [line for m in models for o in OPTIMIZERS for line in same_as_replicated(m, o, 4, square_loss)]
