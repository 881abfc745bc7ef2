"""Small models of transformers, for the tests of this folder."""

from __future__ import annotations

import functools

import torch
import transformers

from tests.distributed.training import seeded
from tests.parallel.runs import Kind

BATCH, LENGTH, VOCABULARY = 4, 9, 64
OFF = dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
SMALL = OFF | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "use_cache": False,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
TIED = {"tie_word_embeddings": True}
GPT2 = OFF | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
T5 = {"d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
T5 |= {"dropout_rate": 0.0, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0}
EXPERTS = GROUPED | {"intermediate_size": 24, "experts_implementation": "eager"}  # others have no float64
MIXTRAL = EXPERTS | {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Llama, tied": ("LlamaForCausalLM", GROUPED | TIED | {"attention_bias": True}),
    "Mistral": ("MistralForCausalLM", GROUPED | {"head_dim": 8}),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "Qwen3, tied": ("Qwen3ForCausalLM", GROUPED | TIED | {"head_dim": 8}),
    # Its logits are capped before the loss.
    "Gemma 2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 8, "final_logit_softcapping": 5.0}),
    "Gemma": ("GemmaForCausalLM", SMALL | {"num_key_value_heads": 1, "head_dim": 8}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", SMALL),
    "GPT-NeoX, tied": ("GPTNeoXForCausalLM", SMALL | TIED),
    "Phi": ("PhiForCausalLM", SMALL),
    "Phi, norms of heads": ("PhiForCausalLM", SMALL | {"qk_layernorm": True}),
    "Apertus": ("ApertusForCausalLM", GROUPED),
    "Phi 3, gathered": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "OLMo 2, gathered": ("Olmo2ForCausalLM", GROUPED),
    "GLM, gathered": ("GlmForCausalLM", GROUPED | {"head_dim": 8, "pad_token_id": 0}),
    # Those with experts.
    "Mixtral": ("MixtralForCausalLM", MIXTRAL),
    "Mixtral, in a batch": ("MixtralForCausalLM", MIXTRAL | {"experts_implementation": "batched_mm"}),
    "Mixtral, without the loss of balance": ("MixtralForCausalLM", MIXTRAL | {"output_router_logits": False}),
    "Qwen3, some experts": (
        "Qwen3MoeForCausalLM",
        EXPERTS | CHOSEN | {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]},
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        EXPERTS | {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8},
    ),
    # These have no plan; the second one has a loss of its own.
    "GPT-2": ("GPT2LMHeadModel", GPT2),
    "T5": ("T5ForConditionalGeneration", T5),
}


def build(name, seed=0, **others):
    cls, options = MODELS[name]
    cls = getattr(transformers, cls)
    return seeded(cls, cls.config_class(**options | {"use_cache": False} | others), seed=seed).double()


def batch(number):
    """Inputs of a model by name."""
    tokens = tokens_of(number)
    return {"input_ids": tokens, "labels": tokens}


def tokens_of(number):
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))


def loss_of(model, number, own=slice(None)):
    return model(**{key: value[own].contiguous() for key, value in batch(number).items()}).loss


def kind_of(name):
    """For `runs.plain` and `runs.divided`."""
    return Kind(functools.partial(build, name), loss_of, None, BATCH)
