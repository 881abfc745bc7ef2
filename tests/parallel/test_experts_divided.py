"""Experts that are divided over tensor ranks train to the values of one process."""

import functools
import re

import pytest
import torch
import transformers
from torch import nn

from tests.parallel.trained import divided, plain
from zeroshard.parallel.tensor.division import match

BATCH, LENGTH, VOCABULARY = 4, 9, 64
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "use_cache": False,
}
SMALL |= {"experts_implementation": "eager"}  # that of grouped products has no float64
MIXTRAL = SMALL | {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
QWEN3 = SMALL | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "mlp_only_layers": [0],
}
LATENT = SMALL | {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_shared_experts": 1}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
MODELS = {
    "Mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, MIXTRAL),
    "Mixtral, in a batch": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        MIXTRAL | {"experts_implementation": "batched_mm"},
    ),
    "Mixtral, without the loss of balance": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        MIXTRAL | {"output_router_logits": False},
    ),
    "Qwen3, some layers": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, QWEN3),
    "DeepSeek V2": (
        transformers.DeepseekV2ForCausalLM,
        transformers.DeepseekV2Config,
        LATENT | {"q_lora_rank": 12, "first_k_dense_replace": 1},
    ),
    "Llama 4": (
        transformers.Llama4ForCausalLM,
        transformers.Llama4TextConfig,
        SMALL | {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8},
    ),
}


def build(name, seed=0):
    cls, config, options = MODELS[name]
    torch.manual_seed(seed)
    return cls(config(**options)).double()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.long_where(stage=[1])
@pytest.mark.long_where(name=[name for name in MODELS if name != "Mixtral"])
@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_one_process(ranks, name, num_ranks, tp, stage):
    of = functools.partial(build, name), batch
    want_losses, want_norms, want = plain(*of, num_parts=num_ranks // tp)  # balance is of each rank's batch
    for losses, norms, state in ranks(num_ranks, divided, *of, stage, tp):
        assert losses == pytest.approx(want_losses, rel=1e-6)  # the factor of clipping is rounded to float32
        assert norms == pytest.approx(want_norms, rel=1e-5)  # routing and the loss are in float32
        for key, value in state.items():
            # Adam divides small gradients, which come from a loss in float32, by their own size.
            torch.testing.assert_close(value, want[key], rtol=0, atol=3e-5, msg=key)


def build_in_float32(seed=0):
    torch.manual_seed(seed)
    options = MIXTRAL | {"experts_implementation": "grouped_mm", "intermediate_size": 32}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))


@pytest.mark.long
@pytest.mark.parametrize("tp", [2, 4])
def test_products_of_all_experts_at_once_are_divided_too(ranks, tp):
    want_losses, want_norms, _ = plain(build_in_float32, batch)
    for losses, norms, _ in ranks(tp, divided, build_in_float32, batch, 3, tp):
        assert losses == pytest.approx(want_losses, rel=1e-5)  # float32, sums in another order
        assert norms == pytest.approx(want_norms, rel=1e-4)


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
