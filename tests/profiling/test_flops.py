"""Floating-point operations of a Llama are those that a person counts."""

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard.profiling.flops import FlopCounter

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
    seconds = profile.seconds_per_step
    assert profile.utilization == pytest.approx(profile.model_flops / seconds / 1e12)
    assert profile.hardware_utilization == pytest.approx(profile.flops / seconds / 1e12)
    assert ("all that ran" in str(profile)) == (profile.flops != profile.model_flops)
    return profile.flops, profile.model_flops


@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize(
    ("stage", "recompute", "attention", "products"),
    [(3, "none", "sdpa", 5), (3, "unit", "sdpa", 5), (0, "unit", "eager", 4)],
)
def test_a_llama_has_three_times_its_forward_and_once_more_what_is_recomputed(
    ranks, stage, recompute, attention, products
):
    """A kernel of attention computes the scores once more in its backward: 5 products in place of 4."""
    # The second forward of a block ends before its last layer, whose output nobody keeps.
    again = BLOCKS * (FORWARD_OF_LINEAR + 2 * SCORES - 2 * TOKENS * WIDTH * INNER)
    want = 3 * (BLOCKS * FORWARD_OF_LINEAR + HEAD) + BLOCKS * (2 + products) * SCORES
    of_model = want - BLOCKS * (products - 4) * SCORES
    want += again if recompute == "unit" else 0
    for found in ranks(2, counted, attention, {"stage": stage, "recompute": recompute}, False):
        assert found == (want, of_model)


class Twice(nn.Module):
    """A linear layer inside a checkpoint of the user, which needs its product again, and one outside."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_second_forward_is_not_of_the_model_but_its_backward_is(keeps_graph):
    model, x = Twice(), torch.ones(4, 8, requires_grad=True)
    product = 2 * 4 * 8 * 8
    counter = FlopCounter(lambda: False)
    counter.begin()
    model(x).sum().backward(create_graph=keeps_graph)
    found = counter.stop()
    assert found == (7 * product, 6 * product)
    assert counter.stop() is None


def test_the_products_of_an_optimizer_are_not_of_the_model():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    optimizer = zeroshard.optim.Muon(model.parameters(), lr=0.1)
    engine = zeroshard.initialize(model, optimizer, {"stage": 1}).engine
    with zeroshard.profile(engine, flops=True) as profile:
        engine.backward(engine(torch.ones(4, 8)).sum())
        engine.step()
    assert profile.model_flops == 2 * (2 * 4 * 8 * 8)
    assert profile.flops > profile.model_flops
    with pytest.raises(RuntimeError, match="and a second one with flops=True"):
        print(profile.seconds_per_step)
    assert "TFLOP" in str(profile)


def test_a_profile_needs_an_engine_and_a_peak_above_0():
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(
        TypeError, match=r"expected an engine, or a model of zeroshard\.shard, got Sequential"
    ):
        zeroshard.profile(model).__enter__()
    engine = zeroshard.initialize(model, torch.optim.SGD, {"stage": 1}).engine
    for peak in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="peak_flops: expected a number above 0"):
            zeroshard.profile(engine, peak_flops=peak).__enter__()


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


def test_frozen_weights_have_no_gradients(ranks):
    for found in ranks(2, counted, "eager", {"stage": 3}, True):
        assert found == (adapted(), adapted())
