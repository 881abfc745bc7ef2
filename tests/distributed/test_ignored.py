"""Parameters that are not sharded, each rank's own."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import numbers, start, step
from tests.ranks import on_ranks
from zeroshard.optim import Muon, muon_groups

WIDTH = 7
IGNORED = ["blocks.*.scale", "expert.*"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * self.scale


class Model(nn.Module):
    """Has an expert of its own on each rank."""

    def __init__(self):
        super().__init__()
        self.blocks, self.expert = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(self.expert.weight)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.expert(x)


def loss_of(model, number):
    return model(numbers(number, 5, WIDTH)).square().mean()


def names_of(model):
    return [name for name, _ in model.named_parameters() if "scale" in name or "expert" in name]


def built():
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_checkpoints_leave_ignored_parameters_out_with_a_warning_and_alone_when_loaded(tmp_path, stage):
    engine, optimizer = start(built(), "AdamW", stage=stage, ignored=IGNORED)
    optimizer = engine.optimizer
    step(engine, optimizer, loss_of, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(str(tmp_path), "a")
    notes = [
        str(warning.message)
        for warning in caught
        if "leaves out" in str(warning.message) and warning.filename == __file__
    ]
    before = {name: p.detach().clone() for name, p in engine.named_parameters()}
    step(engine, optimizer, loss_of, 1)
    after = {name: p.detach().clone() for name, p in engine.named_parameters()}
    states = {name: dict(optimizer.state[engine.get_parameter(name)]) for name in names_of(engine)}
    engine.load_checkpoint(str(tmp_path), "a")
    wrong = []
    for name, parameter in engine.named_parameters():
        want = after if name in states else before
        wrong += [name] * (not torch.equal(parameter.detach(), want[name]))
    for name, state in states.items():
        wrong += [f"state of {name}"] * (optimizer.state[engine.get_parameter(name)] != state)
    step(engine, optimizer, loss_of, 2)
    assert wrong == []
    assert len(notes) == 1
    assert "'blocks.0.scale'" in notes[0]


@on_ranks(1)
def test_a_matrix_in_a_group_of_muon_is_refused_before_a_step():
    model = built()
    with pytest.raises(ValueError, match=r"'expert.weight' is ignored, and in group \d, .*use_muon=False"):
        start(model, Muon(muon_groups(model)), ignored=["expert.*"])


@on_ranks(1)
def test_patterns_that_fit_nothing_and_dtypes_that_need_other_gradients_are_refused():
    messages = []
    for config in (
        {"ignored": ["blocks.*.gain"]},
        {"ignored": ["expert.*"], "precision": {"param_dtype": "float16"}},
        {"ignored": ["expert.*"], "precision": {"main_dtype": "bfloat16"}},
    ):
        with pytest.raises(ValueError, match="ignored") as caught:
            start(built(), "SGD", **config)
        messages.append(str(caught.value))
    unknown, half, narrow = messages
    assert "no parameter whose name fits 'blocks.*.gain'" in unknown
    assert "needs precision.param_dtype to be another dtype than float16" in half
    assert "needs precision.main_dtype to be another dtype than bfloat16" in narrow
