"""Models that are divided over tensor ranks train to the values of one process."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.parallel.runs import WIDTH, adamw, compare, divided, plain


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.long_where(stage=[0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "tp"), [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4)])
def test_losses_norms_and_parameters_are_those_of_one_process(ranks, num_ranks, tp, stage):
    config = {"stage": stage, "mesh": {"tp": tp}, "clip_grad_norm": 0.5}
    want = plain(adamw, steps=6, max_norm=0.5)
    compare(ranks(num_ranks, divided, config, adamw, steps=6), want, losses=1e-7, norms=1e-6, values=1e-7)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
        self.down, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.head(self.down(F.gelu(self.up(self.norm(x)))))


def with_a_divided_last_layer():
    torch.manual_seed(0)
    plan = {"up": "colwise", "down": "rowwise", "head": "colwise"}
    engine = zeroshard.initialize(Classifier(), adamw, {"stage": 1, "mesh": {"tp": 2}}, tp_plan=plan).engine
    before = engine.module.up.weight.detach().clone()
    engine.backward(F.cross_entropy(engine(torch.randn(6, WIDTH)), torch.arange(6) % 4))
    text = "the tensor ranks [0, 1] have different losses"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        engine.step()
    is_same = torch.equal(engine.module.up.weight, before)
    engine.close(restore=False)
    return is_same


def test_a_loss_of_parts_is_an_error_at_the_first_step(ranks):
    assert ranks(2, with_a_divided_last_layer) == [True, True]


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
