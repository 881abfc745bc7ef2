"""Plans find layers and cut them, or tell why they cannot; the words of plans say what layers do."""

import re

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.parallel.models import build
from zeroshard.comm.collectives import Axis
from zeroshard.parallel.tensor.division import match, plan_division, plan_of
from zeroshard.parallel.tensor.layers import install
from zeroshard.parallel.tensor.sequence import Activations
from zeroshard.parallel.tensor.styles import LayerPlan, Split
from zeroshard.parameters.parts import part_of
from zeroshard.plan.cuts import Section, heads
from zeroshard.plan.units import find_units
from zeroshard.sharding.context import Changes


class Model(nn.Module):
    """Layers between which a rank has a part, or a whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(12, 8, padding_idx=3)
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(24, 8)
        self.gate_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8, bias=False)  # its output is a sum
        self.each, self.together = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.heads, self.out = nn.Linear(8, 4), nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 24)}) for _ in range(2))

    def forward(self, x):
        x = x + self.outer(self.inner(self.tokens(torch.tensor([3, 0, 11]))).tanh())
        gate, up = self.gate_up(x).chunk(2, -1)
        x = self.down(F.silu(gate) * up).add_(x)
        x = self.norm(self.together(self.each(x).softmax(-1)).add_(x))
        x = self.out(self.heads(x).tanh()).add_(x)
        return self.blocks[1]["up"](x) * self.blocks[0]["up"](x)


PLAN = {
    "tokens": "rowwise",
    "inner": "colwise",
    "outer": "rowwise",
    "gate_up": "packed_colwise",
    "down": "rowwise",
    "each": "colwise_rep",
    "together": "rowwise_rep",
    "heads": "colwise",
    "out": "rowwise",
    "blocks.*.up": "colwise_gather_output",
}


def compared():
    """Outputs and gradients of divided layers, beside those of whole ones."""
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), timeout_s=20.0)
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
    own = (model.inner.out_features, model.outer.out_features, model.blocks[0]["up"].out_features)
    assert own == (24 // over.size, 8, 24)  # a loss may be over the features of a gathered head
    changes.undo()
    assert model.inner.out_features == 24
    assert "forward" not in vars(model.tokens)
    got, want = found
    return [
        (got[name], part_of(value, cuts[name], over.rank) if name in cuts else value)
        for name, value in want.items()
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_divided_layers_compute_and_learn_what_whole_ones_do(ranks, num_ranks):
    for pairs in ranks(num_ranks, compared):
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)  # float64: sums in another order


def test_a_plan_cuts_outputs_inputs_and_tokens():
    model = Model()
    layers = {layer.name: layer.cuts for layer in match(model, PLAN, 2)}
    assert layers.keys() == {*PLAN.keys() - {"blocks.*.up"}, "blocks.0.up", "blocks.1.up"}
    found = {(name, key): cut.local_shape for name, cuts in layers.items() for key, cut in cuts.items()}
    assert found["tokens", "weight"] == (6, 8)
    assert (found["inner", "weight"], found["inner", "bias"], found["outer", "weight"]) == (
        (12, 8),
        (12,),
        (8, 12),
    )
    assert (found["blocks.1.up", "weight"], found["down", "weight"]) == ((12, 8), (8, 6))
    assert [(span.start, span.stop) for span in layers["gate_up"]["weight"].spans(1)] == [(6, 12), (18, 24)]


def test_the_first_pattern_that_fits_holds_and_heads_stay_whole():
    plan = {"blocks.0.*": "replicate", "blocks.*.up": LayerPlan(Split.COLUMNS, heads(2, 4, size=4))}
    (layer,) = match(Model(), plan, 2)
    assert layer.name == "blocks.1.up"
    assert layer.cuts["weight"].local_shape == (12, 8)


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ({"up": "colwise"}, ["blocks.0.up", "blocks.1.up"]),
        ({"1.up": "colwise"}, ["blocks.1.up"]),
        ({"blocks.?.[u]*": "colwise"}, ["blocks.0.up", "blocks.1.up"]),
        ({"0.up": "replicate", "up": "colwise"}, ["blocks.1.up"]),
        ({"out": "rowwise"}, ["out"]),  # the full name of one, and no end of another
    ],
)
def test_a_plan_names_modules_as_a_config_names_parameters(plan, names):
    model = Model()
    model.blocks[0]["out"] = nn.Linear(8, 8)
    assert [layer.name for layer in match(model, plan, 2)] == names


def test_the_keys_of_a_model_of_transformers_are_full_names():
    model = Model()
    model.tp_plan = {"up": "colwise", "blocks.*.up": "rowwise", "inner": "colwise"}
    assert plan_of(model) == {"blocks.*.up": "rowwise", "inner": "colwise"}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"up.weight": "colwise"}, "tp_plan: no module of the model is called 'up.weight'"),
        ({"blocks.*.up": "columns"}, "expected one of colwise, colwise_gather_output, colwise_shared_heads,"),
        ({"*.attention": "local_params"}, "got 'local_params' for '*.attention'"),
        ({"blocks.*.upp": "colwise"}, "tp_plan: no module of the model is called 'blocks.*.upp'"),
        ({"norm": "colwise"}, "tp_plan: 'norm' is a LayerNorm; expected a Linear or an Embedding"),
        ({"down": "packed_rowwise"}, "'down' is a Linear; expected a Linear or an Embedding"),
        ({"down": "moe_tp_experts"}, "got 'down.weight' of shape (8, 12) with 'replicate'"),
        ({"down": "mla_kv_a_proj"}, "got 'mla_kv_a_proj' for 'down'"),
        ({"down": LayerPlan(Split.ROWS, (Section(9),))}, "expected sections of 12 elements together"),
        ({"tokens": "colwise"}, "expected 'rowwise' for the embedding 'tokens', which is cut by tokens"),
        ({"heads": "colwise"}, "4 elements cannot be divided over mesh.tp=3 ranks"),
        (
            {"blocks.1.up": LayerPlan(Split.COLUMNS, heads(1, 5, size=4))},
            "'blocks.1.up.weight', dimension 0 of shape (24, 8): 1 head of 4",
        ),
    ],
)
def test_words_that_do_not_suit_a_layer_are_refused(plan, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        match(Model(), plan, 3)


@pytest.mark.parametrize("way", [Split.COLUMNS_GATHERED, Split.ROWS_SPLIT])
def test_parts_of_several_sections_are_not_gathered_or_split_in_rank_order(way):
    with pytest.raises(ValueError, match=f"expected one section for '{way.value}', .* got 2"):
        LayerPlan(way, heads(2, 2, size=3))


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


def test_a_layer_whose_weight_is_computed_is_refused():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    with pytest.raises(ValueError, match="'0' computes its weight of other parameters, as after weight_norm"):
        match(model, {"0": "colwise"}, 2)


def test_an_embedding_that_changes_its_rows_is_refused():
    model = nn.ModuleDict({"tokens": nn.Embedding(12, 8, max_norm=1.0)})
    with pytest.raises(ValueError, match="'tokens' has max_norm, scale_grad_by_freq or sparse"):
        match(model, {"tokens": "rowwise"}, 2)


def test_adapters_are_refused_where_there_are_several_tensor_ranks():
    model = peft.get_peft_model(Model(), peft.LoraConfig(target_modules=["inner"]))
    specs = find_units(model, None)
    for plan in (None, {"*.inner.base_layer": "colwise"}):
        with pytest.raises(ValueError, match=r"mesh\.tp=2: PeftModel has adapters of peft, .* Stage 3"):
            plan_division(model, specs, plan, 2)
        assert len(plan_division(model, specs, plan, 1).specs) == len(specs)


def test_ignored_parameters_of_divided_layers_are_refused():
    model, plan = Model(), {"inner": "colwise", "outer": "rowwise", "norm": "replicated_with_grad_allreduce"}
    for name in ("outer.weight", "norm.bias"):  # a part, and a summand of the gradient
        specs = find_units(model, None, [name])
        with pytest.raises(ValueError, match=f"'ignored': each tensor rank computes with a part of '{name}'"):
            plan_division(model, specs, plan, 2)
        assert len(plan_division(model, specs, plan, 1).specs) == len(specs)
    plan_division(model, find_units(model, None, ["outer.bias", "down.*"]), plan, 2)
    model.norm.requires_grad_(False)
    plan_division(model, find_units(model, None, ["norm.*"]), plan, 2)


def test_tied_layers_must_be_cut_alike():
    model = Model()
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


# ------------------------------------------------------------------- plans of transformers


def test_a_plan_has_the_patterns_that_fit_a_variant():
    plan, more = (plan_of(build(name)) for name in ("Phi", "Phi, norms of heads"))
    assert more.keys() - plan.keys() == {"*self_attn.[qk]_layernorm"}
    for model in (nn.Linear(2, 2), build("GPT-2"), build("T5")):
        assert plan_of(model) == {}


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    model = build("Llama")
    model.resize_token_embeddings(66)
    text = "q_proj.weight', dimension 0 of shape (32, 32): 4 heads of 8 cannot be"
    with pytest.raises(ValueError, match=re.escape(text)):
        match(model, plan_of(model), 3)


def test_latent_attention_is_refused():
    attention = nn.ModuleDict({"q_proj": nn.Linear(8, 8)})
    attention.qk_rope_head_dim = 2
    with pytest.raises(ValueError, match=r"'self_attn\.q_proj' is in latent attention, which is not divided"):
        match(nn.ModuleDict({"self_attn": attention}), {"*.q_proj": "colwise"}, 2)


# ----------------------------------------------------------------------------------------------- experts


class Experts(nn.Module):
    def __init__(self, *, bias=False, **attributes):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(3, 8, 5))
        self.down_proj = nn.Parameter(torch.ones(3, 5, 4))
        if bias:
            self.down_bias = nn.Parameter(torch.ones(3, 5))
        vars(self).update(attributes)


WORDS = {
    "experts": "moe_tp_experts",
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
}


def test_each_rank_has_a_part_of_the_gate_and_of_the_up_of_each_expert():
    (layer,) = match(nn.ModuleDict({"experts": Experts()}), WORDS, 2)
    gate_up, down = layer.cuts["gate_up_proj"], layer.cuts["down_proj"]
    assert (gate_up.local_shape, down.local_shape) == ((3, 4, 5), (3, 5, 2))
    assert [(span.start, span.stop) for span in gate_up.spans(1)] == [(2, 4), (6, 8)]
    assert [(span.start, span.stop) for span in down.spans(1)] == [(2, 4)]


@pytest.mark.parametrize(
    ("experts", "words", "text"),
    [
        ({}, {"experts.down_proj": "replicate"}, "got 'experts.down_proj' of shape (3, 5, 4) with 'repl"),
        ({"bias": True}, {}, "got 'experts.down_bias' of shape (3, 5) with 'replicate'"),
        ({"bias": True}, {"experts.down_bias": "colwise"}, "got 'experts.down_bias' of shape (3, 5) with"),
        ({"has_post_expert_norm": True}, {}, "'experts' normalizes the output of each expert"),
        ({"is_concatenated": False}, {}, "the gate and up of 'experts' alternate; expected no 'packed_colw"),
        ({}, {"other": "rowwise"}, "no module of the model is called 'other'"),
    ],
)
def test_experts_whose_outputs_would_not_add_up_are_refused(experts, words, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        match(nn.ModuleDict({"experts": Experts(**experts)}), WORDS | words, 2)


def test_hidden_elements_that_do_not_divide_are_refused_with_the_numbers():
    text = "'experts.gate_up_proj', dimension 1 of shape (3, 8, 5): 4 elements cannot be divided over mesh.t"
    with pytest.raises(ValueError, match=re.escape(text)):
        match(nn.ModuleDict({"experts": Experts()}), WORDS, 3)
