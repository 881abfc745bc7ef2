"""Models whose forward computes something between their modules are refused before they are cut."""

import pytest
import torch
import transformers
from torch import nn

from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import require_handed_on

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "head_dim": 8,
    "pad_token_id": 0,
}


def build(kind, **others):
    config = getattr(transformers, f"{kind}Config")(**SMALL | others)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "GPTNeoX", "Phi", "Gemma"])
def test_models_that_hand_values_on_are_cut(kind):
    model = build(kind)
    before = {name: id(module) for name, module in model.named_modules()}
    require_handed_on(Chunked(model), torch.device("cpu"))
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_gpt2_adds_its_positions_in_the_first_chunk_alone():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2))
    require_handed_on(Chunked(model), torch.device("cpu"))


def test_a_model_without_memory_is_checked_too():
    with torch.device("meta"):
        model = build("Llama")
    require_handed_on(Chunked(model), torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("Cohere", {"logit_scale": 0.0625}),
        ("Gemma2", {"final_logit_softcapping": 30.0}),
        ("Granite", {"logits_scaling": 8.0}),
        ("Granite", {"embedding_multiplier": 12.0}),
    ],
)
def test_factors_of_embeddings_and_logits_are_refused(kind, others):
    model = build(kind, **others)
    with pytest.raises(ValueError, match=rf"mesh.pp: .* got a {kind}ForCausalLM: its forward computes"):
        require_handed_on(Chunked(model), torch.device("cpu"))


def test_blocks_that_hand_on_more_than_a_tensor_are_refused():
    model = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(ValueError, match=r"mesh.pp: .* got a BloomForCausalLM: "):
        require_handed_on(Chunked(model), torch.device("cpu"))


def test_a_module_in_several_places_of_a_sequence_is_in_each_of_them():
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act)
    assert Chunked(model).outline.blocks == ("0", "1", "2", "3")
