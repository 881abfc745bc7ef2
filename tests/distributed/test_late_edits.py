"""Parameters that are edited through `.data` while no forward of their unit runs keep the edit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.training import STAGES, numbers, same_as_replicated, start


def scale(module):
    module.weight.data.mul_(0.75)


def replace(module):
    module.weight.data = module.weight.data * 0.75


class Block(nn.Module):
    def __init__(self, edit):
        super().__init__()
        self.edit = edit
        self.weight, self.inner = nn.Parameter(torch.randn(7, 7) / 3), nn.Linear(7, 7)

    def forward(self, x):
        return (self.inner(x) @ self.weight).tanh()


class InHook(Block):
    """Edited in the backward, after the gradient of the weight is known."""

    def __init__(self, edit):
        super().__init__(edit)
        self.inner.register_full_backward_hook(self.after_backward)

    def after_backward(self, *_):  # a method: a deep copy of the model has the hook of the copy
        self.edit(self)


class InTensorHook(Block):
    def forward(self, x):
        hidden = self.inner(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.edit(self))
        return (hidden @ self.weight).tanh()


class InSecondForward(Block):
    """Edited when a checkpoint runs a part of the forward again, and not before."""

    num_calls = 0

    def part(self, x):
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            self.edit(self)
        return self.inner(x) @ self.weight

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False).tanh()


def build(block, edit):
    torch.manual_seed(0)
    layers = [nn.Sequential(block(edit), nn.Linear(7, 7)) for _ in range(2)]
    return nn.Sequential(nn.Linear(7, 7), *layers, nn.Linear(7, 1))


def same_batch_loss(model, number):
    """The same inputs on all ranks, so that all make the same edits."""
    return model(numbers(number, 5, 7, rank=0)).square().mean()


def edited(block, edit, units):
    return same_as_replicated(build(block, edit), "SGD", 3, same_batch_loss, units=units)


@pytest.mark.long_where(block=[InTensorHook])
@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("block", [InHook, InTensorHook, InSecondForward])
def test_an_edit_in_a_backward_is_kept(ranks, num_ranks, block):
    for edit in (scale, replace):
        for units in (["Sequential"], [block.__name__], []):
            assert not any(ranks(num_ranks, edited, block, edit, units))


class Generates(nn.Module):
    def __init__(self, edit):
        super().__init__()
        self.edit, self.first = edit, Block(edit)
        self.second = nn.Sequential(nn.Linear(7, 7), nn.Tanh())

    def forward(self, x):
        return self.second(self.first(x))

    def generate(self, x):
        before = self(x)
        self.edit(self.first)
        return before + self(x)


def edited_between_forwards(stage, edit):
    torch.manual_seed(0)
    model = Generates(edit)
    plain, x = copy.deepcopy(model), numbers(0, 5, 7, rank=0)
    engine, _ = start(model, "SGD", stage=stage, units=["Block"])
    with torch.no_grad():
        for number in range(2):
            assert torch.equal(engine.generate(x), plain.generate(x)), number
            assert torch.equal(engine(x), plain(x)), number
    state = engine.full_state_dict()
    return [name for name, value in state.items() if not torch.equal(value, plain.state_dict()[name])]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_edit_between_the_forwards_of_generate_is_kept(ranks, num_ranks):
    for stage in STAGES:
        for edit in (scale, replace):
            assert not any(ranks(num_ranks, edited_between_forwards, stage, edit))
