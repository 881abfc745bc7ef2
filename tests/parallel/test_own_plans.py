"""Our plans for models for which transformers has none; and the cuts of experts."""

import re

import pytest
import torch
import transformers
from torch import nn

from tests.parallel.models import T5, build
from zeroshard.parallel.tensor.division import match, plan_of
from zeroshard.plan.cuts import heads


def test_each_rank_has_whole_heads_of_queries_of_keys_and_of_values():
    model = build("GPT-2")
    cuts = {layer.name: layer.cuts for layer in match(model, plan_of(model), 2)}
    cut = cuts["transformer.h.0.attn.c_attn"]["weight"]
    assert (cut.dim, cut.sections) == (1, heads(4, 4, 4, size=8))
    assert [span.start for span in cut.spans(1)] == [16, 48, 80]
    cut = cuts["transformer.h.1.attn.c_proj"]["weight"]
    assert (cut.dim, cut.sections) == (0, heads(4, size=8))
    assert "transformer.wpe" not in cuts


def test_a_plan_has_the_patterns_that_fit_a_variant():
    tied, encoder = build("T5"), transformers.T5EncoderModel(transformers.T5Config(**T5))
    assert "lm_head" in plan_of(tied)
    assert "lm_head" not in plan_of(encoder)
    assert plan_of(nn.Linear(2, 2)) == {}
    for model in (tied, encoder):
        divided_layers = {layer.name for layer in match(model, plan_of(model), 2)}
        linear = {name for name, one in model.named_modules() if isinstance(one, (nn.Linear, nn.Embedding))}
        assert divided_layers == linear


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    model = build("GPT-2")
    model.resize_token_embeddings(66)
    text = "'transformer.h.0.attn.c_attn.weight', dimension 1 of shape (32, 96): 4 heads of 8 cannot be"
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
