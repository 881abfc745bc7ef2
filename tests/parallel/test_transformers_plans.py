"""Models of transformers are divided by their own plans, and train to the values of one process."""

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import zeroshard

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "use_cache": False,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
MODELS = {
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, GROUPED),
    "Llama, tied": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        GROUPED | {"tie_word_embeddings": True, "attention_bias": True},
    ),
    "Qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, GROUPED | {"head_dim": 8}),
    "Gemma": (
        transformers.GemmaForCausalLM,
        transformers.GemmaConfig,
        SMALL | {"num_key_value_heads": 1, "head_dim": 8},
    ),
    "GPT-NeoX": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig, SMALL),
    "GPT-NeoX, tied": (
        transformers.GPTNeoXForCausalLM,
        transformers.GPTNeoXConfig,
        SMALL | {"tie_word_embeddings": True},
    ),
    "Phi": (transformers.PhiForCausalLM, transformers.PhiConfig, SMALL),
    "Phi, norms of heads": (
        transformers.PhiForCausalLM,
        transformers.PhiConfig,
        SMALL | {"qk_layernorm": True},
    ),
    "Apertus": (transformers.ApertusForCausalLM, transformers.ApertusConfig, GROUPED),
    "Phi 3, gathered": (transformers.Phi3ForCausalLM, transformers.Phi3Config, GROUPED | {"pad_token_id": 0}),
    "OLMo 2, gathered": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config, GROUPED),
    "GLM, gathered": (
        transformers.GlmForCausalLM,
        transformers.GlmConfig,
        GROUPED | {"head_dim": 8, "pad_token_id": 0},
    ),
}
FAST = ("Llama", "Qwen3", "Phi, norms of heads")
BATCH, LENGTH, STEPS = 4, 9, 5


def build(name, seed=0):
    cls, config, options = MODELS[name]
    torch.manual_seed(seed)
    off = dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"), 0.0)
    return cls(config(**options, **off)).double()


def adamw(parameters):
    # Biases of keys have gradients near 0, of rounding in the float32 loss. With 1e-8 each is a whole step.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(SMALL["vocab_size"], (BATCH, LENGTH), generator=generator)


def plain(name):
    model = build(name)
    optimizer, losses = adamw(model.parameters()), []
    for number in range(STEPS):
        tokens = batch(number)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def divided(name, config):
    model = build(name, seed=dist.get_rank())
    engine = zeroshard.initialize(model, adamw, config | {"clip_grad_norm": 0.5}).engine
    axis, losses = engine._axes.dp, []
    for number in range(STEPS):
        tokens = batch(number).chunk(axis.size)[axis.rank]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append((axis.sum(loss.detach(), "test") / axis.size).item())
    state = engine.full_state_dict()
    engine.close(restore=False)
    return losses, state


@pytest.mark.long_where(name=["Phi, norms of heads"])
@pytest.mark.long_where(stage=[1])
@pytest.mark.long_where(name=["Llama"], num_ranks=[4])
@pytest.mark.long_where(name=["Llama"], tp=[4])
@pytest.mark.long_where(name=["Qwen3"], num_ranks=[4])
@pytest.mark.long_where(name=[name for name in MODELS if name not in FAST])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_one_process(ranks, name, num_ranks, tp, stage):
    want_losses, want = plain(name)
    for losses, state in ranks(num_ranks, divided, name, {"stage": stage, "mesh": {"tp": tp}}):
        assert losses == pytest.approx(want_losses, rel=1e-6)  # the factor of clipping is rounded to float32
        for key, value in state.items():
            # The loss of transformers is in float32, and Adam divides small gradients by their own size.
            torch.testing.assert_close(value, want[key], rtol=0, atol=3e-5, msg=key)


def refused(name):
    with pytest.raises(ValueError, match=r"64 elements cannot be divided over mesh\.tp=3 ranks"):
        divided(name, {"stage": 1, "mesh": {"tp": 3}})


def test_heads_that_do_not_divide_are_refused_with_the_numbers(ranks):
    ranks(3, refused, "Llama")
