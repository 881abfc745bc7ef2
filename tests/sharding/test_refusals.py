"""Parameters and buffers that sharding would change are refused by name; what looks alike is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.plan.units import find_units


class Logged(nn.Parameter):
    """One with operations of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """One with a name of its own and nothing else."""


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def same_data():
    model = two_layers()
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def rows_of_one():
    model = two_layers()
    table = torch.randn(6, 4)
    model[0].weight, model[1].weight = nn.Parameter(table[:4]), nn.Parameter(table[2:])
    return model


def same_data_deferred():
    with zeroshard.deferred_init():
        return same_data()


def same_data_on_meta():
    with torch.device("meta"):
        return same_data()


def one_trained():
    model = same_data()
    model[1].weight.requires_grad_(False)
    return model


def other_dtype():
    model = two_layers()
    model[1].bias = nn.Parameter(model[0].weight.data.view(torch.bfloat16).flatten()[:4])
    return model


def columns_of_one():
    model = two_layers()
    table = torch.randn(4, 8)
    model[0].weight, model[1].weight = nn.Parameter(table[:, :4]), nn.Parameter(table[:, 4:])
    return model


def buffer_of_a_parameter():
    model = two_layers()
    model[1].register_buffer("first", model[0].weight.data[:2])
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (same_data, "parameter '0.weight' and parameter '1.weight' share memory .*b.weight = a.weight"),
        (rows_of_one, "parameter '0.weight' and parameter '1.weight' share memory .*clone"),
        (same_data_deferred, "parameter '0.weight' and parameter '1.weight' share memory"),
        (same_data_on_meta, "parameter '0.weight' and parameter '1.weight' share memory"),
        (one_trained, "parameter '0.weight' and parameter '1.weight' share memory"),
        (columns_of_one, "parameter '0.weight' and parameter '1.weight' share memory .*clone"),
        (other_dtype, "parameter '0.weight' and parameter '1.bias' share memory"),
        (buffer_of_a_parameter, "parameter '0.weight' and buffer '1.first' share memory .*in forward"),
    ],
)
def test_parameters_that_share_memory_are_refused_by_both_names(make, names):
    with pytest.raises(ValueError, match=names):
        find_units(make(), None)


def tied():
    model = two_layers()
    model[1].weight = model[0].weight
    return model


def parts_of_one():
    model = two_layers()
    flat = torch.randn(32)
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    return model


def frozen():
    return same_data().requires_grad_(False)


def empty():
    model = two_layers()
    model.a, model.b = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    return model


def meta():
    with torch.device("meta"):
        return two_layers()


def shared_buffers():
    model = two_layers()
    table = torch.randn(4)
    model.register_buffer("table", table)
    model.register_buffer("part", table[:2])
    return model


def named():
    model = two_layers()
    model[0].weight = Named(torch.randn(4, 4))
    return model


@pytest.mark.parametrize(
    "make", [tied, parts_of_one, frozen, empty, meta, shared_buffers, named, nn.Sequential]
)
def test_what_only_looks_like_it_is_accepted(make):
    find_units(make(), None)


def test_a_parameter_of_a_class_with_operations_of_its_own_is_refused_by_name():
    model = two_layers()
    model[1].weight = Logged(torch.randn(4, 4))
    with pytest.raises(
        ValueError, match=r"parameter '1\.weight' is a Logged .*expected a torch\.nn\.Parameter"
    ):
        find_units(model, None)


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
