"""Units from which nothing is gathered, exchanged or stepped in a backward: on one rank, all but the root."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.ranks import on_ranks
from zeroshard.parameters.sharded import ShardedParameter

CONFIG = {"stage": 3, "units": ["Linear"]}


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def kinds(model):
    return {type(parameter) for parameter in model.parameters()}


@on_ranks(1)
def test_a_part_that_is_called_alone_and_again_in_a_backward_shows_nothing_afterwards():
    """A gradient of inputs through a part that autograd computes again, and calls that fail."""
    plain, engine = layers(), zeroshard.initialize(layers(), None, CONFIG).engine
    assert engine._runtime.passes.quiet.keys() == {*engine._runtime.units[1:]}
    found = []
    for part in (plain[1], engine.module[1]):
        inputs = torch.ones(2, 4, requires_grad=True)
        outputs = checkpoint(part, inputs, use_reentrant=False).sum()
        found.append(torch.autograd.grad(outputs, inputs)[0])
    assert kinds(engine.module) == {ShardedParameter}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine(torch.ones(2, 5))
    assert kinds(engine.module) == {ShardedParameter}
    assert torch.equal(*found)


class Boxed(nn.Linear):
    """Puts its output into a list, returns nothing, and may move its weight."""

    moves = False

    def forward(self, box):
        if self.moves:
            with torch.no_grad():
                self.weight.set_(self.weight.detach() / 2)
        box[0] = super().forward(box[0])


class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Boxed(4, 4), Boxed(4, 4)

    def forward(self, x):
        box = [x]
        self.first(box)
        self.second(box)
        return box[0]


@on_ranks(1)
def test_a_unit_that_returns_nothing_and_moves_its_weight_is_refused():
    engine = zeroshard.initialize(Boxes(), None, CONFIG | {"units": ["Boxed"]}).engine
    engine(torch.ones(2, 4)).sum().backward()
    engine.module.second.moves = True
    with pytest.raises(RuntimeError, match=r"'second\.weight' was edited in a forward"):
        engine(torch.ones(2, 4))
    assert kinds(engine.module) == {ShardedParameter}


@on_ranks(1)
def test_a_part_that_is_called_alone_has_the_edits_of_its_parameters():
    config = CONFIG | {"stage": 0, "precision": "bf16"}
    engine = zeroshard.initialize(layers(), None, config).engine
    part = engine.module[1]
    with torch.no_grad():
        part.weight.zero_()
        part.bias.fill_(2.0)
    assert part(torch.ones(1, 4, dtype=torch.bfloat16)).tolist() == [[2.0] * 4]
