"""Models that are divided over tensor ranks train to the values of one process."""

import functools
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.checkpoint.runs import without_numba
from tests.distributed.training import ALL_STAGES
from tests.parallel.models import MODELS, kind_of
from tests.parallel.runs import (
    WIDTH,
    adamw,
    check_same,
    compare,
    divided,
    initialize,
    loss_of,
    own_part,
    plain,
    small_gpt,
)
from tests.ranks import on_ranks
from zeroshard.optim import LAMB, LARS, AdamW8bit


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 3), *((4, stage) for stage in ALL_STAGES)])
def test_losses_norms_and_parameters_are_those_of_one_process(ranks, num_ranks, stage):
    config = {"stage": stage, "mesh": {"tp": 2}, "clip_grad_norm": 0.5}
    want = plain(adamw, steps=6, max_norm=0.5)
    compare(ranks(num_ranks, divided, config, adamw, steps=6), want, losses=1e-7, norms=1e-6, values=1e-7)


OVERRIDES = {"*norm*": "bf16", "second": "bf16", "blocks.1.up": "fp32", "blocks.*.down": "fp32"}
"""A bfloat16 norm in a float64 model: a cast that is missing shows in 3 digits."""


def test_divided_layers_and_norms_beside_them_compute_in_their_dtype(ranks):
    config = {"stage": 3, "precision": {"overrides": OVERRIDES}}
    [want] = ranks(1, divided, config, adamw)
    found = ranks(2, divided, config | {"mesh": {"tp": 2}}, adamw)
    check_same(found)
    for run in found:
        # Sums of gradients over the ranks are rounded to bfloat16 on their way through a norm.
        assert run.losses[:2] == pytest.approx(want.losses[:2], rel=1e-6)
        assert run.losses == pytest.approx(want.losses, rel=2e-4)
        assert run.norms == pytest.approx(want.norms, rel=2e-3)


# ------------------------------------------------------------------------------ models of transformers


def steady_adamw(parameters):
    # Biases of keys have gradients near 0, of rounding in the float32 loss. With 1e-8 each is a whole step.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


FAST = {("Mixtral", 2, 2)}
MORE_RANKS = ("Llama, tied", "Gemma")
"""Models that are divided over 4 tensor ranks as well, some of which share heads of keys then."""
OTHERS = ("Qwen3, tied", "Gemma 2", "GPT-2", "T5")
"""Models that test_loss.py trains, and models without a plan."""
NAMES = [name for name in MODELS if name not in OTHERS]
CASES = [
    *((name, 2, 2, 3) for name in NAMES),
    *((name, 4, 2, stage) for name, stage in (("Llama, tied", 3), ("Mixtral", 1))),
    *((name, 4, 4, 3) for name in MORE_RANKS),
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "tp", "stage"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case[:3] not in FAST)) for case in CASES],
)
def test_a_model_of_transformers_trains_as_in_one_process(ranks, name, num_ranks, tp, stage):
    config = {"stage": stage, "mesh": {"tp": tp}, "clip_grad_norm": 0.5}
    # The loss of balance is of each rank's batch.
    want = plain(steady_adamw, kind=kind_of(name), max_norm=0.5, num_parts=num_ranks // tp)
    found = ranks(num_ranks, divided, config, steady_adamw, kind=kind_of(name))
    # The loss of transformers is in float32, and Adam divides small gradients by their own size.
    compare(found, want, losses=1e-6, norms=1e-5, values=3e-5)


# ------------------------------------------------------------------------------------- first values


@pytest.mark.long_where(how=["deferred"])
@pytest.mark.parametrize(("how", "stage"), [("in memory", 3), ("deferred", 0)])
@on_ranks(4)
def test_all_ranks_begin_with_the_values_of_rank_0(how, stage):
    rank, want = dist.get_rank(), small_gpt(0)
    with zeroshard.deferred_init() if how == "deferred" else nullcontext():
        model = small_gpt(rank)
    model.register_buffer("offset", torch.full((3,), float(rank), dtype=torch.float64))
    engine = initialize(model, adamw, {"stage": stage, "mesh": {"tp": 2}})
    engine.backward(loss_of(engine, 0, own_part(engine._axes.dp)))
    engine.step()
    optimizer = adamw(want.parameters())
    loss_of(want, 0).backward()
    optimizer.step()
    assert engine.module.offset.tolist() == [0.0] * 3
    state = engine.full_state_dict()
    assert rank or state.keys() == want.state_dict().keys() | {"offset"}
    for name, value in want.state_dict().items() if not rank else ():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9, msg=name)


# ------------------------------------------------------------------------------- norms and thresholds

LAYERWISE = {
    "LARS": functools.partial(LARS, lr=0.5, weight_decay=0.01, trust_coefficient=0.02),
    "LAMB": functools.partial(LAMB, lr=1e-2),
}


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "name", "stage"), [(2, "LAMB", 3), (4, "LARS", 0)])
def test_trust_ratios_are_those_of_whole_matrices(ranks, name, num_ranks, stage):
    config = {"stage": stage, "mesh": {"tp": 2}}
    runs = ranks(num_ranks, divided, config, LAYERWISE[name], timeout=120)
    compare(runs, plain(LAYERWISE[name]), losses=1e-9, norms=1e-6, values=1e-9)


# ------------------------------------------------------------------------------------------ states in blocks

OF_8_BITS = functools.partial(AdamW8bit, lr=1e-2, min_8bit_size=600)
"""Matrices of 1024 elements, of which two tensor ranks hold 512 each, have states of 8 bits."""


@on_ranks(2)
@without_numba
def test_thresholds_and_counts_are_of_whole_parameters():
    engine = initialize(small_gpt(0).float(), OF_8_BITS, {"stage": 3, "mesh": {"tp": 2}})
    tokens = torch.arange(20).view(4, 5)
    engine.backward(engine(tokens).square().mean())
    engine.step()
    want = {name: p.numel() >= 600 for name, p in small_gpt(0).named_parameters()}
    found = {p.fqn: engine.optimizer.state[p]["exp_avg"].dtype for p in engine.parameters()}
    assert {name: dtype is torch.uint8 for name, dtype in found.items()} == want
    assert engine.num_parameters() == sum(p.numel() for p in small_gpt(0).parameters())


# ------------------------------------------------------------------------------------------ refusals


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
        self.down, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.head(self.down(F.gelu(self.up(self.norm(x)))))


@on_ranks(2)
def test_a_loss_of_parts_is_an_error_at_the_first_step():
    torch.manual_seed(0)
    plan = {"up": "colwise", "down": "rowwise", "head": "colwise"}
    engine = zeroshard.initialize(Classifier(), adamw, {"stage": 1, "mesh": {"tp": 2}}, tp_plan=plan).engine
    before = engine.module.up.weight.detach().clone()
    engine.backward(F.cross_entropy(engine(torch.randn(6, WIDTH)), torch.arange(6) % 4))
    with pytest.raises(RuntimeError, match=re.escape("the tensor ranks [0, 1] have different losses")):
        engine.step()
    assert torch.equal(engine.module.up.weight, before)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ([("up", "colwise")], "tp_plan: expected words by pattern, {'layers.*.up': 'colwise', ...}, got [("),
        ({}, "tp_plan: expected words by pattern, {'layers.*.up': 'colwise', ...}, got {}"),
        ({"up": ["colwise"]}, "got ['colwise'] for 'up'"),
        ({"up": "columns"}, "got 'columns' for 'up'"),
    ],
)
def test_a_plan_of_another_form_is_refused_at_any_size(plan, text, tp):
    with pytest.raises(ValueError, match=re.escape(text)):
        zeroshard.initialize(Classifier(), adamw, {"mesh": {"tp": tp}}, tp_plan=plan)
