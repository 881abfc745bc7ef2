"""Adapters of peft around quantized weights: training with the weight itself, and merging."""

import peft
import pytest
import torch
import transformers

import zeroshard
from tests.ranks import on_ranks
from tests.sharding.quantized import adamw, base, llama, plain, same_state, tokens_of, train

TARGETS = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, init_lora_weights=False, **TARGETS),
    "rslora": lambda: peft.LoraConfig(r=4, use_rslora=True, init_lora_weights=False, **TARGETS),
    "hira": lambda: peft.HiraConfig(r=4, init_weights=False, **TARGETS),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, init_weights=False, use_cayley_neumann=False, **TARGETS),
}


def build(kind, adapter):
    """A quantized model has the marks of transformers, by which peft chooses its layers."""
    model = base(kind)
    object.__setattr__(model, f"is_loaded_in_{8 if kind == 'int8' else 4}bit", True)
    torch.manual_seed(1)
    return peft.get_peft_model(model, ADAPTERS[adapter]())


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("nf4 twice", "dora"),
        pytest.param("int8", "hira", marks=pytest.mark.long),  # peft cannot build int8 with DoRA on a CPU
        pytest.param("nf4 twice", "oft", marks=pytest.mark.long),
    ],
)
@on_ranks(2)
def test_adapters_that_dequantize_the_weight_train_as_in_one_process(kind, adapter):
    model = build(kind, adapter)
    want = plain(model, range(3), 2)
    engine = zeroshard.initialize(build(kind, adapter), adamw, {"stage": 3}).engine
    assert train(engine, range(3)) == want
    if state := engine.full_state_dict():
        same_state(state, dict(model.state_dict()))


# ------------------------------------------------------------------------------------------------- merging


def scaled(kind):
    return build(kind, "rslora")


def merged_before(kind):
    model = build(kind, "rslora")
    model.merge_adapter()
    return model


@pytest.mark.parametrize("kind", ["nf4 twice", pytest.param("int8", marks=pytest.mark.long)])
@pytest.mark.parametrize("make", [scaled, merged_before])
@on_ranks(2)
@torch.no_grad()
def test_a_stream_with_merged_adapters_computes_what_the_model_computes(make, kind):
    engine = zeroshard.initialize(make(kind), adamw, {"stage": 3}).engine
    state = {name: value.clone() for name, value in engine.named_full_parameters(merge_adapters=True)}
    model = transformers.LlamaForCausalLM(llama())
    model.load_state_dict(state)
    want = make(kind)(input_ids=tokens_of(0)).logits
    torch.testing.assert_close(model(input_ids=tokens_of(0)).logits, want, rtol=1e-4, atol=1e-4)
