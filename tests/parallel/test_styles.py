"""The words of plans: what they do to layers, and the errors for words that say nothing here."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.parallel.tensor.activations import Activations
from zeroshard.parallel.tensor.division import match, plan_division
from zeroshard.parallel.tensor.layers import install
from zeroshard.parallel.tensor.styles import LayerPlan, Split
from zeroshard.parameters.parts import part_of
from zeroshard.plan.cuts import heads
from zeroshard.plan.units import find_units
from zeroshard.sharding.context import Changes


class Model(nn.Module):
    """Layers between which a rank has a part, or a whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8, bias=False)  # its output is a sum
        self.each, self.together = nn.Linear(8, 12), nn.Linear(12, 8)
        self.biases = nn.Embedding(5, 4)
        self.heads, self.out = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        x = self.down(F.silu(gate) * up).add_(x)
        x = self.together(self.each(x).softmax(-1)).add_(x)
        return self.out(self.heads(x).tanh() * self.biases(torch.arange(3))).add_(x)


PLAN = {
    "gate_up": "packed_colwise",
    "down": "rowwise",
    "each": "colwise_rep",
    "together": "rowwise_rep",
    "biases": "embedding_per_head",
    "heads": "colwise",
    "out": "rowwise",
}


def compared():
    """Outputs and gradients of divided layers, beside those of whole ones."""
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), counter=Counter(), timeout_s=20.0)
    over, changes = Activations(axis, tag=1), Changes()
    whole, model = Model().double(), Model().double()
    layers = match(model, PLAN, over.size)
    install(model, layers, over, changes)
    cuts = {f"{layer.name}.{attribute}": cut for layer in layers for attribute, cut in layer.cuts.items()}
    for name, parameter in model.named_parameters():
        if name in cuts:
            parameter.data = part_of(parameter.data, cuts[name], over.rank).clone()
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for one in (model, whole):
        own = x.clone().requires_grad_()
        output = one(own)
        output.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
        found.append({"output": output.detach(), "x": own.grad} | gradients)
    changes.undo()
    assert model.biases.embedding_dim == 4
    got, want = found
    return [
        (got[name], part_of(value, cuts[name], over.rank) if name in cuts else value)
        for name, value in want.items()
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_words_say_how_layers_pass_their_values_on(ranks, num_ranks):
    for pairs in ranks(num_ranks, compared):
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)  # float64: sums in another order


def test_halves_are_cut_each():
    cuts = {layer.name: layer.cuts for layer in match(Model(), PLAN, 2)}
    assert [(span.start, span.stop) for span in cuts["gate_up"]["weight"].spans(1)] == [(6, 12), (18, 24)]
    assert (cuts["biases"]["weight"].dim, cuts["biases"]["weight"].local_shape) == (1, (5, 2))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"*.attention": "local_params"}, "expected one of colwise, colwise_gather_output, colwise_shared"),
        ({"*.attention": "local_params"}, "got 'local_params' for '*.attention'"),
        ({"down": "packed_rowwise"}, "'down' is a Linear; expected a Linear, an Embedding or a Conv1D"),
        ({"down": "embedding_per_head"}, "'down' is a Linear; expected"),
        ({"down": "moe_tp_experts"}, "got 'down.weight' of shape (8, 12) with 'replicate'"),
        ({"biases": "packed_colwise"}, "expected 'rowwise' for the embedding 'biases'"),
        ({"down": "mla_kv_a_proj"}, "expected 'qk_rope_head_dim' in the Model that holds it, got None"),
        ({"biases": "embedding_per_head"}, "4 elements cannot be divided over mesh.tp=3 ranks"),
    ],
)
def test_words_that_do_not_suit_a_layer_are_refused(plan, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        match(Model(), plan, 3)


@pytest.mark.parametrize("way", [Split.COLUMNS_GATHERED, Split.ROWS_SPLIT])
def test_parts_of_several_sections_are_not_gathered_or_split_in_rank_order(way):
    with pytest.raises(ValueError, match=f"expected one section for '{way.value}', .* got 2"):
        LayerPlan(way, heads(2, 2, size=3))


def test_a_parameter_is_not_cut_for_one_layer_and_whole_for_another():
    model = nn.ModuleDict({"tokens": nn.Embedding(12, 8), "head": nn.Linear(8, 12, bias=False)})
    model.head.weight = model.tokens.weight
    text = "'head.weight' is cut, but tied to 'tokens.weight', which is not; expected both in the plan"
    with pytest.raises(ValueError, match=re.escape(text)):
        plan_division(model, find_units(model, None), {"head": "colwise_gather_output"}, 2)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.q, self.out = 4, nn.Linear(8, 8), nn.Linear(8, 8)


def test_heads_that_a_module_counts_must_be_in_the_plan():
    model, plan = nn.ModuleDict({"attention": Counted()}), {"*.q": "colwise", "*.out": "rowwise"}
    text = "'attention.q' is next to 'num_heads' of a Counted, and each rank computes some of these heads"
    with pytest.raises(ValueError, match=re.escape(text)):
        plan_division(model, find_units(model, None), plan, 2)
    plan["*.q"] = LayerPlan(Split.COLUMNS, heads(4, size=2))
    assert len(plan_division(model, find_units(model, None), plan, 2).layers) == 2
