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
    train,
    train_replicated,
    train_sharded,
)


def against_replicated(kinds, optimizers, num_steps):
    found = []
    for kind in kinds:
        for optimizer in optimizers:
            model = build(kind)
            found += [f"{kind}: {line}" for line in same_as_replicated(model, optimizer, num_steps)]
    return found


@pytest.mark.long_where(optimizer=["fused AdamW"])
@pytest.mark.parametrize(
    ("optimizer", "kinds", "num_steps"),
    [
        ("AdamW", ["GPT", "tied GPT", "Llama", "tied Llama"], 4),
        ("fused AdamW", ["tied GPT", "Llama"], 4),
        ("SGD", ["GPT", "tied Llama"], 4),
        pytest.param("AdamW", ["GPT", "tied GPT", "Llama", "tied Llama"], 20, marks=pytest.mark.long),
        pytest.param("fused AdamW", ["tied GPT", "Llama"], 20, marks=pytest.mark.long),
        pytest.param("SGD", ["GPT", "tied Llama"], 20, marks=pytest.mark.long),
    ],
)
def test_steps_on_two_ranks_equal_those_of_ddp_to_the_bit_at_every_stage(ranks, optimizer, kinds, num_steps):
    assert ranks(2, against_replicated, kinds, [optimizer], num_steps, timeout=200) == [[], []]


FEW_OR_TWENTY = pytest.mark.parametrize("num_steps", [4, pytest.param(20, marks=pytest.mark.long)])


@FEW_OR_TWENTY
def test_a_llama_of_transformers_trains_as_in_ddp_to_the_bit(ranks, num_steps):
    pytest.importorskip("transformers")
    found = ranks(2, against_replicated, ["tied transformers Llama"], ["AdamW"], num_steps, timeout=200)
    assert found == [[], []]


@FEW_OR_TWENTY
def test_steps_on_one_rank_equal_those_of_plain_pytorch_to_the_bit(ranks, num_steps):
    for kind, optimizer in (("tied GPT", "AdamW"), ("Llama", "fused AdamW"), ("GPT", "SGD")):
        assert ranks(1, against_replicated, [kind], [optimizer], num_steps) == [[]]


# ------------------------------------------------------------------------------------ three or more ranks


def first_gradients(model, stage):
    """(of zeroshard, of DDP)"""
    replica = replicate(model)
    token_loss(replica, 0).backward()
    engine, _ = start(copy.deepcopy(model), "SGD", stage=stage)
    token_loss(engine, 0).backward()
    return full_gradients(engine), flat_gradients(replica)


def on_many_ranks(kind, stages, num_steps):
    """By optimizer: where stages differ, and how far they are from DDP."""
    model, found = build(kind), {}
    found["gradients"] = max(distances(*first_gradients(model, 3)).values())
    for optimizer in ("SGD", "AdamW"):
        want = train_replicated(model, optimizer, num_steps)
        runs = {s: train_sharded(model, optimizer, num_steps, stage=s) for s in stages}
        found[f"{optimizer}: stages"] = [
            line for stage in stages for line in differences(f"stage {stage}", runs[stage], runs[3])
        ]
        pairs = zip(runs[3].losses, want.losses, strict=True)
        found[f"{optimizer}: losses"] = max(abs(a - b) / abs(b) for a, b in pairs)
        if runs[3].parameters:
            found[f"{optimizer}: each"] = max(distances(runs[3].parameters, want.parameters).values())
            found[f"{optimizer}: all"] = distance_of_all(runs[3].parameters, want.parameters)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "kind", "stages"),
    [
        pytest.param(3, "tied GPT", (0, 3), marks=pytest.mark.long),
        pytest.param(3, "tied GPT", (1, 2, 3), marks=pytest.mark.long),
        pytest.param(4, "Llama", (1, 3), marks=pytest.mark.long),
    ],
)
def test_on_more_ranks_stages_agree_to_the_bit_and_stay_close_to_ddp(ranks, num_ranks, kind, stages):
    results = ranks(num_ranks, on_many_ranks, kind, stages, 20, timeout=200)
    for result in results:
        assert result["gradients"] <= 1e-6
        for optimizer in ("SGD", "AdamW"):
            assert result[f"{optimizer}: stages"] == []
            assert result[f"{optimizer}: losses"] <= 1e-6
    assert results[0]["SGD: each"] <= 5e-6
    assert results[0]["AdamW: all"] <= 5e-5


def stages_in_bf16(kind, num_steps):
    model, precision = build(kind), {"param_dtype": "bf16"}
    runs = [train_sharded(model, "AdamW", num_steps, stage=s, precision=precision) for s in ALL_STAGES]
    return [line for stage in ALL_STAGES for line in differences(f"stage {stage}", runs[stage], runs[0])]


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))])
def test_stages_agree_to_the_bit_in_bf16(ranks, num_ranks):
    assert ranks(num_ranks, stages_in_bf16, "tied GPT", 6, timeout=120) == [[]] * num_ranks


# ------------------------------------------------------------------------------------------- small shapes


class OneElement(nn.Module):
    """One parameter, and of it one element."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((), 1.5))

    def forward(self, x):
        return x * self.factor


def small_shapes(num_blocks):
    torch.manual_seed(0)
    found = []
    for model in (Tiny(num_blocks), OneElement(), nn.Sequential(nn.Linear(7, 1))):
        for optimizer in ("AdamW", "SGD"):
            want = train_replicated(model, optimizer, 4, square_loss)
            runs = [train_sharded(model, optimizer, 4, square_loss, stage=stage) for stage in ALL_STAGES]
            found += [line for stage in ALL_STAGES for line in differences(f"{stage}", runs[stage], runs[3])]
            for name, value in runs[3].parameters.items():
                torch.testing.assert_close(value, want.parameters[name], rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.long
def test_there_may_be_more_ranks_than_blocks_and_than_elements(ranks):
    assert ranks(4, small_shapes, 2) == [[]] * 4


def small_shapes_to_the_bit():
    torch.manual_seed(0)
    models = [Tiny(1), Tiny(3), OneElement(), nn.Sequential(nn.Linear(7, 1))]
    return [line for m in models for o in OPTIMIZERS for line in same_as_replicated(m, o, 4, square_loss)]


def test_parameters_of_one_element_train_as_in_ddp_to_the_bit(ranks):
    assert ranks(2, small_shapes_to_the_bit) == [[], []]


def by_prefetch_and_units():
    found, model = [], build("tied GPT")
    want = train_replicated(model, "AdamW", 4)
    for options in (
        {"num_prefetch": 0},
        {"num_prefetch": 3},
        {"reshard_after_forward": False},
        {"units": ["Block"]},
        {"units": ["Linear", "Block", "LayerNorm"]},
        {"units": lambda module: False},
    ):
        engine, optimizer = start(copy.deepcopy(model), stage=3, **options)
        found += differences(str(options), train(engine, optimizer, 4), want)
    return found


@pytest.mark.long
def test_units_and_prefetch_and_resharding_do_not_change_the_numbers(ranks):
    assert ranks(2, by_prefetch_and_units) == [[], []]
