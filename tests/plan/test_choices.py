"""Modules of which a forward may run a part are in one unit with the module around them; refusals by name."""

from __future__ import annotations

import types
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import zeroshard
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


class Dropping(Whole):
    """Leaves out blocks with a chance, as encoders of transformers do."""

    def __init__(self, rate=0.1):
        super().__init__()
        self.layerdrop = rate


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.tail = inner, nn.ModuleList([Block(), Block()])


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


class Logged(nn.Parameter):
    """One with operations of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """One with a name of its own and nothing else."""


WEIGHT = nn.Parameter(torch.ones(4, 4))


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def with_weights(first, second):
    model = two_layers()
    model[0].weight, model[1].weight = first, second
    return model


def same_data():
    table = torch.randn(4, 4)
    return with_weights(nn.Parameter(table), nn.Parameter(table))


def of_one_table(rows, columns, first, second):
    table = torch.randn(rows, columns)
    return with_weights(nn.Parameter(table[first].view(4, 4)), nn.Parameter(table[second].view(4, 4)))


def other_dtype():
    model = two_layers()
    model[1].bias = nn.Parameter(model[0].weight.data.view(torch.bfloat16).flatten()[:4])
    return model


def buffer_of_a_parameter():
    model = two_layers()
    model[1].register_buffer("first", model[0].weight.data[:2])
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (same_data, "parameter '0.weight' and parameter '1.weight' share memory .*b.weight = a.weight"),
        (
            partial(of_one_table, 6, 4, slice(4), slice(2, 6)),
            "parameter '0.weight' and parameter '1.weight' share memory .*clone",
        ),
        (
            partial(of_one_table, 4, 8, (slice(4), slice(4)), (slice(4), slice(4, 8))),
            "parameter '0.weight' and parameter '1.weight' share memory .*clone",
        ),
        (other_dtype, "parameter '0.weight' and parameter '1.bias' share memory"),
        (buffer_of_a_parameter, "parameter '0.weight' and buffer '1.first' share memory .*in forward"),
        (
            lambda: with_weights(WEIGHT, Logged(torch.randn(4, 4))),
            r"parameter '1\.weight' is a Logged .*expected a torch\.nn\.Parameter",
        ),
    ],
)
def test_parameters_that_share_memory_or_have_operations_of_their_own_are_refused_by_name(make, names):
    with pytest.raises(ValueError, match=names):
        find_units(make(), None)


@pytest.mark.parametrize("context", [zeroshard.deferred_init, lambda: torch.device("meta"), nullcontext])
def test_memory_is_shared_also_without_values_and_where_one_is_frozen(context):
    with context():
        model = same_data()
    model[1].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"parameter '0.weight' and parameter '1.weight' share memory"):
        find_units(model, None)


def shared_buffers():
    model = two_layers()
    table = torch.randn(4)
    model.register_buffer("table", table)
    model.register_buffer("part", table[:2])
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_weights(WEIGHT, WEIGHT),
        partial(of_one_table, 2, 16, 0, 1),
        shared_buffers,
        lambda: with_weights(WEIGHT, Named(torch.randn(4, 4))),
        nn.Sequential,
    ],
)
def test_what_only_looks_like_it_is_accepted(make):
    find_units(make(), None)
    find_units(same_data().requires_grad_(False), None)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), r"torch\.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), r"torch\.sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"torch\.qint8"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_buffer_that_is_not_dense_is_refused_by_name(make, kind):
    model = two_layers()
    model[1].register_buffer("table", make())
    with pytest.raises(ValueError, match=rf"buffer '1\.table' is {kind}; expected a dense buffer"):
        find_units(model, None)
