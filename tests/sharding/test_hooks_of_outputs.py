"""Hooks of the user on tensors that a model returns, and gradients that share memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.ranks import on_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Model(nn.Module):
    """Returns its hidden states; one block returns the output of a unit inside, as it is."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Sequential(Block()), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return self.head(x).square().mean(), hidden


@pytest.mark.parametrize(("stage", "recompute"), [(0, "none"), (3, "none"), (3, "unit")])
@on_ranks(2)
def test_a_hook_on_a_hidden_state_changes_the_gradients_of_all_that_made_it(stage, recompute):
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    config = {"stage": stage, "units": ["Block", "Sequential"], "recompute": recompute}
    engine = zeroshard.initialize(Model(), lambda ps: torch.optim.SGD(ps, 1.0), config).engine
    for model, backward in ((plain, torch.Tensor.backward), (engine, engine.backward)):
        loss, hidden = model(torch.ones(2, 4))
        for number, state in enumerate(hidden):
            state.register_hook(lambda gradient, factor=number + 2: gradient * factor)
        backward(loss)
    for name, parameter in plain.named_parameters():
        # All ranks have the same batch, and factors are whole: the mean is exact.
        assert torch.equal(engine.full_gradient(name), parameter.grad), name


class Shared(nn.Module):
    """Autograd gives its two parameters views of one gradient."""

    def __init__(self):
        super().__init__()
        self.rows, self.more = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return x * (self.rows.view(2, 2) + self.more)


@on_ranks(1)
def test_gradients_that_share_memory_are_unscaled_once():
    model = nn.Sequential(nn.Linear(2, 2), Shared())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(0.0)
    precision = {"param_dtype": "float16", "loss_scale": 1024.0, "overrides": {"1": "float32"}}
    engine = zeroshard.initialize(model, lambda ps: torch.optim.SGD(ps, 1.0), {"precision": precision}).engine
    engine.backward(engine(torch.ones(2, 2)).sum())
    for name in ("1.rows", "1.more"):
        assert engine.full_gradient(name).reshape(-1).tolist() == [2.0] * 4


@on_ranks(2)
def test_a_sparse_gradient_of_one_dimension_is_refused():
    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(8))

        def forward(self, places):
            return torch.gather(self.table, 0, places, sparse_grad=True).sum()

    engine = zeroshard.initialize(Picked(), lambda ps: torch.optim.SGD(ps, 1.0)).engine
    with pytest.raises(RuntimeError, match=r"of 'table' is torch\.sparse_coo; expected a dense one: build"):
        engine.backward(engine(torch.tensor([0, 3])))
