"""Models that compute something between their modules are refused before they are cut."""

import pytest
import torch
import transformers
from torch import nn

import zeroshard
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import require_handed_on

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 20,
}
BLOOM = {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20}


def build(kind, sizes):
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma", "Mixtral", "GPTNeoX"])
def test_models_whose_modules_follow_each_other_may_be_cut(kind, is_deferred):
    sizes = {key: value for key, value in SIZES.items() if kind != "GPTNeoX" or key != "num_key_value_heads"}
    if is_deferred:
        with zeroshard.deferred_init():
            model = build(kind, sizes)
    else:
        model = build(kind, sizes)
    require_handed_on(Chunked(model), CPU)


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("Gemma2", SIZES | {"head_dim": 8}, "computes outside of these"),  # scales embeddings, bounds logits
        ("Granite", SIZES | {"embedding_multiplier": 2.0}, "computes outside of these"),
        ("Granite", SIZES | {"logits_scaling": 2.0}, "computes outside of these"),
        ("Cohere", SIZES, "computes outside of these"),  # scales logits
        ("Bloom", BLOOM, "does not run without its blocks"),  # its blocks return tuples
    ],
)
def test_models_that_compute_between_their_modules_are_refused(kind, sizes, why):
    model = build(kind, sizes).eval()
    tokens = torch.arange(6).view(1, 6)
    before = model(input_ids=tokens).logits
    with pytest.raises(ValueError, match=rf"^mesh\.pp: expected .*; got a {kind}ForCausalLM: .*{why}"):
        require_handed_on(Chunked(model), CPU)
    assert torch.equal(model(input_ids=tokens).logits, before)


class FromTokens(transformers.LlamaForCausalLM):
    """A model whose mask is made of tokens, which later chunks do not get."""

    def forward(self, input_ids=None, attention_mask=None, **options):
        if attention_mask is None and input_ids is not None:
            attention_mask = (input_ids > 0).long()
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)


def test_a_forward_of_the_user_around_the_blocks_is_refused():
    model = FromTokens(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="the forward of FromTokens may use what the first chunk gets"):
        require_handed_on(Chunked(model), CPU)


def test_a_sequence_is_not_checked_and_random_numbers_stay():
    sequence = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    require_handed_on(Chunked(sequence), CPU)
    llama = build("Llama", SIZES)
    state = torch.get_rng_state()
    require_handed_on(Chunked(llama), CPU)
    assert torch.equal(torch.get_rng_state(), state)
