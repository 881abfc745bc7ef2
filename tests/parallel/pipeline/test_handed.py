"""Models that compute something between their modules are refused before they are cut."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import KINDS, SIZES, of_kind
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import require_handed_on

CPU = torch.device("cpu")
BLOOM = {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20}


@pytest.mark.long_where(kind=[kind for kind in KINDS if kind not in ("Llama", "GPT2")])
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_models_whose_modules_follow_each_other_may_be_cut(kind, is_deferred):
    with zeroshard.deferred_init() if is_deferred else nullcontext():
        model = of_kind(kind)
    before = {name: id(module) for name, module in model.named_modules()}
    require_handed_on(Chunked(model), CPU)
    assert {name: id(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("Gemma2", {}, "computes outside of these"),  # scales embeddings, bounds logits
        ("Granite", {"embedding_multiplier": 2.0}, "computes outside of these"),
        ("Granite", {"logits_scaling": 2.0}, "computes outside of these"),
        ("Cohere", {}, "computes outside of these"),  # scales logits
        ("Bloom", BLOOM, "does not run without its blocks"),  # its blocks return tuples
    ],
)
def test_models_that_compute_between_their_modules_are_refused(kind, sizes, why):
    model = of_kind(kind, **sizes)
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
    act = nn.Tanh()  # in each of its places
    chunked = Chunked(nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act))
    assert chunked.outline.blocks == ("0", "1", "2", "3")
    require_handed_on(chunked, CPU)
    llama = of_kind("Llama")
    state = torch.get_rng_state()
    require_handed_on(Chunked(llama), CPU)
    assert torch.equal(torch.get_rng_state(), state)
