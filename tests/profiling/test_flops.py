"""Floating-point operations of a Llama are those that a person counts."""

import peft
import pytest
import torch
import transformers

import zeroshard

WIDTH, INNER, HEADS, GROUPS, VOCABULARY, BLOCKS = 64, 96, 4, 2, 128, 2
SAMPLES, LENGTH, RANK = 2, 16, 4
SIZE = WIDTH // HEADS
TOKENS = SAMPLES * LENGTH

QUERIES, KEYS = WIDTH * WIDTH, WIDTH * GROUPS * SIZE
LINEAR = 2 * QUERIES + 2 * KEYS + 3 * WIDTH * INNER
"""Weights of the layers of a block: queries and outputs, keys and values, the MLP."""
FORWARD_OF_LINEAR = 2 * TOKENS * LINEAR
SCORES = 2 * SAMPLES * HEADS * LENGTH * LENGTH * SIZE
"""One product of queries with keys, or of scores with values."""
HEAD = 2 * TOKENS * WIDTH * VOCABULARY


def llama(attention):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        use_cache=False,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def counted(attention, config, lora):
    model = llama(attention)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["q_proj", "down_proj"]))
    engine = zeroshard.initialize(model, torch.optim.AdamW, config).engine
    tokens = torch.arange(TOKENS).reshape(SAMPLES, LENGTH)
    with zeroshard.profile(engine, flops=True, peak_flops=1e12) as profile:
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    assert profile.utilization == pytest.approx(profile.flops / profile.seconds_per_step / 1e12)
    return profile.flops


@pytest.mark.long_where(stage=[0], recompute=["unit"])
@pytest.mark.long_where(stage=[0], attention=["eager"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("recompute", ["none", "unit"])
@pytest.mark.parametrize(("attention", "products"), [("eager", 4), ("sdpa", 5)])
def test_a_llama_has_three_times_its_forward_and_once_more_what_is_recomputed(
    ranks, stage, recompute, attention, products
):
    """A kernel of attention computes the scores once more in its backward: 5 products in place of 4."""
    # The second forward of a block ends before its last layer, whose output nobody keeps.
    again = BLOCKS * (FORWARD_OF_LINEAR + 2 * SCORES - 2 * TOKENS * WIDTH * INNER)
    want = 3 * (BLOCKS * FORWARD_OF_LINEAR + HEAD) + BLOCKS * (2 + products) * SCORES
    want += again if recompute == "unit" else 0
    for found in ranks(2, counted, attention, {"stage": stage, "recompute": recompute}, False):
        assert found == want


def adapted():
    """The operations of a training of adapters over frozen weights."""
    adapters = 2 * TOKENS * RANK * (WIDTH + WIDTH + INNER + WIDTH)
    forward = BLOCKS * (FORWARD_OF_LINEAR + 2 * SCORES + adapters) + HEAD
    # Frozen weights have no gradients of their own, adapters have.
    backward = BLOCKS * (FORWARD_OF_LINEAR + 4 * SCORES + 2 * adapters) + HEAD
    # Nothing is trained before the first block: its queries, keys and values give no gradient further down.
    first = 2 * TOKENS * (QUERIES + 2 * KEYS) + 2 * TOKENS * RANK * WIDTH
    # Its keys and values depend on nothing that is trained; scores give no gradient to keys, nor to values.
    return forward + backward - first - 2 * SCORES


@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_weights_have_no_gradients(ranks, stage):
    for found in ranks(2, counted, "eager", {"stage": stage}, True):
        assert found == adapted()
