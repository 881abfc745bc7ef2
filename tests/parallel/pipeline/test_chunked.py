"""The chunks of a model, one after another, compute the model; others are refused before they are cut."""

import re
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import KINDS, LENGTH, SIZES, VOCABULARY, of_kind
from zeroshard.parallel.pipeline.chunked import Chunked, outline_of
from zeroshard.parallel.pipeline.cut import require_handed_on


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


RUNS = {
    "a chunk": [range(4)],
    "two chunks": [range(3), range(3, 4)],
    "four chunks": [range(1), range(1, 2), range(2, 3), range(3, 4)],
}


def kept(model, runs, own):
    chunked = Chunked(model)
    chunked.keep(runs, own)
    return chunked


def chunks_of(model, runs, ranks):
    """The chunks, by number; `ranks` are those of each rank, which has a model of its own."""
    found = {}
    for own in ranks:
        mine = type(model)(model.config).eval()
        mine.load_state_dict(model.state_dict())
        chunked = kept(mine, runs, own)
        found |= dict.fromkeys(own, chunked)
    return found


@pytest.mark.long_where(runs=["a chunk", "two chunks"])
@pytest.mark.long_where(kind=["Mixtral", "GPTNeoX", "Phi", "Gemma", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_a_model_of_transformers_compute_it(kind, runs):
    model, given = of_kind(kind), batch()
    want = model(**given)
    num = len(RUNS[runs])
    layouts = [[[number] for number in range(num)]]
    if num == 4:
        layouts.append([[0, 2], [1, 3]])
    for ranks in layouts:
        chunks, value = chunks_of(model, RUNS[runs], ranks), ()
        for number in range(num):
            value = chunks[number](number, value, given)
        assert torch.equal(value.loss, want.loss)
        assert torch.equal(value.logits, want.logits)


def test_a_module_that_is_replaced_later_computes_in_all_forwards_from_then_on():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    chunked, x = kept(model, [range(2), range(2, 3)], [0, 1]), torch.randn(3, 2)
    model[1] = nn.ReLU()
    for _ in range(2):
        (middle,) = chunked(0, (), {"input": x})
        assert torch.equal(middle, model[0](x).relu())
        assert torch.equal(chunked(1, [middle], {}), model[2](middle))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: nn.Linear(2, 2), "got a Linear: it is no such model"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
            ),
            "got a T5ForConditionalGeneration: it",
        ),
    ],
)
def test_a_model_without_such_an_order_is_refused(model, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        outline_of(model())


# ------------------------------------------------------------------------ what is computed between modules

CPU = torch.device("cpu")
BLOOM = {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20}
ZAMBA = {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]}
ZAMBA |= {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "num_mem_blocks": 1}


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
        ("Starcoder2", {"embedding_dropout": 0.5}, "computes outside of these"),  # in train mode
        ("Bloom", BLOOM, "does not run without its blocks"),  # its blocks return tuples
        ("Zamba2", ZAMBA, r"'model\.layers\.0' gets the embeddings, too"),
    ],
)
def test_models_that_compute_between_their_modules_are_refused(kind, sizes, why):
    model = of_kind(kind, **sizes)
    tokens = torch.arange(6).view(1, 6)
    before = model(input_ids=tokens).logits
    with pytest.raises(ValueError, match=rf"^mesh\.pp: expected .*; got a {kind}ForCausalLM: .*{why}"):
        require_handed_on(Chunked(model), CPU)
    assert torch.equal(model(input_ids=tokens).logits, before)
    assert not any(module.training for module in model.modules())


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
