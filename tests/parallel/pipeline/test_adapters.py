"""LoRA over pipeline ranks trains as in one process, and is written for peft.

Tolerances are those of test_training.py.
"""

import peft
import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.pipeline.runs import (
    LAYOUTS,
    MODELS,
    agree,
    build,
    config_of,
    parameters_of,
    start,
    tokens_of,
    train,
    train_plainly,
)
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.chunked import outline_of

STEPS = range(3)


def adapted(name):
    """A model with adapters that change its outputs from the start."""
    targets = ["c_attn", "c_proj", "c_fc"] if "gpt" in name else ["q_proj", "v_proj", "o_proj", "down_proj"]
    options = {"init_lora_weights": False, "fan_in_fan_out": "gpt" in name}
    lora = peft.LoraConfig(r=2, target_modules=targets, **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(MODELS[name](), lora).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.2)  # large adapters magnify rounding in float32
    return model


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.01, momentum=0.9)


def trained(layout, folder, stage, name):
    engine = start(adapted(name), config_of(layout, stage), sgd)
    found = (*train(engine, STEPS), parameters_of(engine))
    engine.save_pretrained(folder)
    return found


@pytest.mark.long_where(name=["llama"])
@pytest.mark.parametrize(("layout", "stage", "name"), [("pp 2", 3, "tied gpt"), ("pp 2 x dp 2", 1, "llama")])
def test_adapters_train_as_in_one_process_and_peft_reads_them(ranks, tmp_path, layout, stage, name):
    model = adapted(name)
    batches = (({"input_ids": tokens}, tokens) for tokens in map(tokens_of, STEPS))
    losses, norms = train_plainly(model, batches, make=sgd, max_norm=0.5)
    want = losses, norms, dict(model.named_parameters(remove_duplicate=False))
    agree(ranks(LAYOUTS[layout][0], trained, layout, tmp_path, stage, name), want)
    model.save_pretrained(tmp_path / "plain")
    places = (folder / "adapter_model.safetensors" for folder in (tmp_path, tmp_path / "plain"))
    written, expected = map(load_file, places)
    assert written.keys() == expected.keys()
    read, tokens = peft.PeftModel.from_pretrained(build(name), tmp_path).double(), tokens_of(0)
    found, want = (one(input_ids=tokens).logits for one in (read, model))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_the_outline_of_a_model_with_adapters_has_the_names_in_the_wrapped_model():
    outline = outline_of(adapted("tied gpt"))
    inside = "base_model.model.transformer"
    assert outline.before == tuple(f"{inside}.{name}" for name in ("wte", "wpe", "drop"))
    assert outline.blocks == tuple(f"{inside}.h.{number}" for number in range(4))
    assert outline.after == (f"{inside}.ln_f", "base_model.model.lm_head")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "PROMPT_TUNING",
        ),
        (
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[1, 2]),
            "LORA",
        ),
        (
            peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9),
            "ADALORA",  # its loss has a penalty over the adapters of all layers
        ),
    ],
)
def test_adapters_that_act_around_the_model_or_depend_on_the_tokens_are_refused_by_name(config, kind):
    text = rf"got adapter 'default' \({kind}\), which acts around the model or depends on the tokens"
    with pytest.raises(ValueError, match=text):
        outline_of(peft.get_peft_model(MODELS["llama"](), config))


@on_ranks(2)
def test_a_stream_has_the_merged_parameters_of_all_parts_on_all_ranks():
    engine = start(adapted("llama"), config_of("pp 2"), sgd)
    train(engine, [0])
    found = {key: values.clone() for key, values in engine.named_full_parameters(merge_adapters=True)}
    state = [engine.full_state_dict()]  # of rank 0, which peft is to merge
    torch.distributed.broadcast_object_list(state)
    model = adapted("llama")
    model.load_state_dict(state[0])
    want = dict(model.merge_and_unload().named_parameters())
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)
