"""Plans find layers and cut them, or tell why they cannot."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.parallel.tensor.activations import Activations
from zeroshard.parallel.tensor.division import match, plan_division
from zeroshard.parallel.tensor.layers import install
from zeroshard.parallel.tensor.styles import LayerPlan, Split
from zeroshard.parameters.parts import part_of, whole_of
from zeroshard.plan.cuts import Cut, Section, heads
from zeroshard.plan.units import find_units
from zeroshard.sharding.context import Changes


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(12, 8, padding_idx=3)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 24)}) for _ in range(2))
        self.inner, self.outer = Conv1D(24, 8), Conv1D(8, 24)
        self.down = nn.Linear(24, 8, bias=False)
        self.norm = nn.LayerNorm(8)


def shapes(plan, num_ranks=2):
    return {
        f"{layer.name}.{attribute}": cut.local_shape
        for layer in match(Layers(), plan, num_ranks)
        for attribute, cut in layer.cuts.items()
    }


def test_a_plan_cuts_outputs_inputs_and_tokens():
    plan = {"tokens": "rowwise", "blocks.*.up": "colwise", "inner": "colwise", "outer": "rowwise"}
    assert shapes(plan | {"down": "rowwise"}) == {
        "tokens.weight": (6, 8),
        **{
            f"blocks.{number}.up.{name}": (12, *rest)
            for number in (0, 1)
            for name, *rest in (("weight", 8), ("bias",))
        },
        "inner.weight": (8, 12),
        "inner.bias": (12,),
        "outer.weight": (12, 8),
        "down.weight": (8, 12),
    }


def test_the_first_pattern_that_fits_holds_and_heads_stay_whole():
    plan = {"blocks.0.*": "replicate", "blocks.*.up": LayerPlan(Split.COLUMNS, heads(1, 5, size=4))}
    with pytest.raises(
        ValueError, match=re.escape("'blocks.1.up.weight', dimension 0 of shape (24, 8): 1 head of 4")
    ):
        shapes(plan)
    plan["blocks.*.up"] = LayerPlan(Split.COLUMNS, heads(2, 4, size=4))
    (layer,) = match(Layers(), plan, 2)
    assert layer.name == "blocks.1.up"
    assert layer.cuts["weight"].local_shape == (12, 8)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            {"blocks.*.up": "columns"},
            "tp_plan: expected one of colwise, colwise_gather_output, colwise_shared_heads,",
        ),
        ({"blocks.*.upp": "colwise"}, "tp_plan: no module of the model is called 'blocks.*.upp'"),
        ({"norm": "colwise"}, "tp_plan: 'norm' is a LayerNorm; expected a Linear, an Embedding or a Conv1D"),
        (
            {"tokens": "colwise"},
            "tp_plan: expected 'rowwise' for the embedding 'tokens', which is cut by tokens",
        ),
        (
            {"down": LayerPlan(Split.ROWS, (Section(20),))},
            "'down.weight': expected sections of 24 elements together",
        ),
    ],
)
def test_errors_name_the_layer(plan, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        shapes(plan)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_layers_with_a_forward_of_their_own_are_refused_where_it_would_be_left_out():
    model = nn.ModuleDict({"attention": nn.ModuleDict({"k_proj": Scaled(8, 4), "o_proj": Scaled(8, 4)})})
    model.attention.head_dim = 4
    with pytest.raises(
        ValueError, match=re.escape("'attention.o_proj' is a Scaled with a forward of its own")
    ):
        match(model, {"attention.o_proj": "rowwise"}, 2)
    with pytest.raises(
        ValueError, match=re.escape("'attention.k_proj' is a Scaled with a forward of its own")
    ):
        match(model, {"attention.k_proj": "colwise"}, 2)


def test_a_layer_whose_weight_is_computed_is_refused():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    with pytest.raises(ValueError, match="'0' computes its weight of other parameters, as after weight_norm"):
        match(model, {"0": "colwise"}, 2)


def test_an_embedding_that_changes_its_rows_is_refused():
    model = nn.ModuleDict({"tokens": nn.Embedding(12, 8, max_norm=1.0)})
    with pytest.raises(ValueError, match="'tokens' has max_norm, scale_grad_by_freq or sparse"):
        match(model, {"tokens": "rowwise"}, 2)


def test_ignored_parameters_of_divided_layers_are_refused():
    model, plan = Layers(), {"inner": "colwise", "outer": "rowwise", "norm": "replicated_with_grad_allreduce"}
    for name in ("outer.weight", "norm.bias"):  # a part, and a summand of the gradient
        specs = find_units(model, None, [name])
        with pytest.raises(ValueError, match=f"'ignored': each tensor rank computes with a part of '{name}'"):
            plan_division(model, specs, plan, 2)
        assert len(plan_division(model, specs, plan, 1).specs) == len(specs)
    plan_division(model, find_units(model, None, ["outer.bias", "down.*"]), plan, 2)
    model.norm.requires_grad_(False)
    plan_division(model, find_units(model, None, ["norm.*"]), plan, 2)


def test_a_model_without_a_plan_is_told_how_to_give_one():
    with pytest.raises(ValueError, match=re.escape("mesh.tp=2: Layers has no plan of its own")):
        plan_division(Layers(), [], None, 2)


def test_tied_layers_must_be_cut_alike():
    model = Layers()
    model.head = nn.Linear(8, 12, bias=False)
    model.head.weight = model.tokens.weight
    specs, plan = find_units(model, None), {"tokens": "rowwise", "head": "rowwise"}
    text = "'head.weight' is tied to 'tokens.weight', which is cut another way"
    with pytest.raises(ValueError, match=re.escape(text)):
        plan_division(model, specs, plan, 2)
    divided = plan_division(model, specs, plan | {"head": "colwise"}, 2).specs
    originals = [original for spec in divided for original in spec.originals]
    assert {o.fqn: o.cut and o.cut.dim for o in originals}["tokens.weight"] == 0
    assert {o.fqn: o.cut for o in originals}["norm.weight"] is None


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("sections", [(), heads(6, 12, size=2), heads(6, 6, size=3)])
def test_all_parts_make_the_whole(num_ranks, sections):
    try:
        cut = Cut("w", (2, 36), 1, num_ranks, sections)
    except ValueError:
        cut = Cut("w", (2, 36), 1, num_ranks)
    whole = torch.arange(72.0).view(cut.shape)
    parts = [part_of(whole, cut, rank) for rank in range(num_ranks)]
    assert all(part.shape == cut.local_shape for part in parts)
    assert torch.equal(whole_of(parts, cut), whole)


def divided_layers():
    """Outputs and gradients of layers of each kind, beside those of whole ones."""
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), counter=Counter(), timeout_s=20.0)
    over, changes, found = Activations(axis, tag=1), Changes(), []
    whole, model = Layers().double(), Layers().double()
    plan = {
        "tokens": "rowwise",
        "inner": "colwise",
        "outer": "rowwise",
        "blocks.0.up": "colwise_gather_output",
    }
    layers = match(model, plan, over.size)
    install(model, layers, over, changes)
    for layer in layers:
        for attribute, cut in layer.cuts.items():
            parameter = layer.module._parameters[attribute]
            parameter.data = part_of(parameter.data, cut, over.rank).clone()
    tokens = torch.tensor([[3, 0, 11, 7]])
    for one in (whole, model):
        hidden = one.blocks[0]["up"](one.outer(one.inner(one.tokens(tokens)).tanh()))
        hidden.square().sum().backward()
        found.append(
            (hidden.detach(), {name: p.grad for name, p in one.named_parameters() if p.grad is not None})
        )
    cuts = {f"{layer.name}.{attribute}": cut for layer in layers for attribute, cut in layer.cuts.items()}
    assert (model.inner.nf, model.outer.nf, model.blocks[0]["up"].out_features) == (
        24 // over.size,
        8,
        24 // over.size,
    )
    changes.undo()
    assert (model.inner.nf, model.blocks[0]["up"].out_features) == (24, 24)
    assert "forward" not in vars(model.tokens)
    (want, want_grads), (got, grads) = found
    pairs = [(got, want)]
    for name, value in want_grads.items():
        pairs.append((grads[name], part_of(value, cuts[name], over.rank) if name in cuts else value))
    return pairs


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_divided_layers_compute_and_learn_what_whole_ones_do(ranks, num_ranks):
    for pairs in ranks(num_ranks, divided_layers):
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)  # float64: sums in another order
