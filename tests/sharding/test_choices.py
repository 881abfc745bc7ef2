"""Modules of which a forward may run a part are in one unit with the module around them."""

import types

import pytest
import torch
from torch import nn

from zeroshard.plan.units import find_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.more = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Dropping(Whole):
    """Leaves out blocks with a chance, as encoders of transformers do."""

    def __init__(self, rate=0.1):
        super().__init__()
        self.layerdrop = rate

    def forward(self, x):
        for block in self.blocks:
            if self.training and torch.rand(()) < self.layerdrop:
                continue
            x = block(x)
        return x


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.tail = inner, nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.tail:
            x = block(x)
        return x


def reasons(model, policy=None):
    return {spec.name: spec.reason for spec in find_units(model, policy)}


def test_modules_around_layers_that_are_dropped_are_units_and_say_why():
    assert reasons(Around(Dropping())) == {
        "": "the rest",
        "inner": "a Dropping, which may run some modules of 'blocks', 'more' alone",
        "tail.0": "one of 2 of class Block in 'tail'",
        "tail.1": "one of 2 of class Block in 'tail'",
    }
    assert list(reasons(Dropping())) == [""]
    assert len(reasons(Whole())) == len(reasons(Dropping(0.0))) == 6
    assert reasons(Whole(), ["Block"])["blocks.1"] == "a Block, listed in units="
    large = reasons(nn.ModuleDict({"head": nn.Linear(1024, 1024, bias=False, device="meta")}))
    assert large["head"] == "a Linear of 1,048,576 elements, 1,048,576 or more, outside of blocks"


@pytest.mark.parametrize("key", ["layerdrop", "speech_encoder_layerdrop"])
def test_the_chance_may_be_in_a_config(key):
    for chance, units in ((0.1, 1), (0.0, 6), (None, 6)):
        model = Whole()
        model.config = types.SimpleNamespace(**{key: chance})
        assert len(reasons(model)) == units


@pytest.mark.parametrize("name", ["experts", "routers"])
def test_lists_that_are_named_like_experts_are_not_cut(name):
    model = Whole()
    setattr(model, name, model.blocks)
    del model.blocks
    assert list(reasons(model)) == ["", "more.0", "more.1"]


@pytest.mark.parametrize("policy", [["ModuleList"], lambda module: isinstance(module, nn.ModuleList)])
def test_a_list_as_a_unit_is_refused_with_what_to_name(policy):
    with pytest.raises(ValueError, match=r"'blocks' is a ModuleList, whose forward is never.*\(Block\)"):
        find_units(Whole(), policy)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:UserWarning")
def test_a_scripted_module_is_refused_wherever_it_is():
    scripted = torch.jit.script(Block())
    with pytest.raises(ValueError, match=r"the model is a scripted .*compile=True"):
        find_units(scripted, None)
    with pytest.raises(ValueError, match=r"module '1' is a scripted"):
        find_units(nn.Sequential(nn.Linear(2, 2), scripted), None)
