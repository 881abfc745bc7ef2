"""LoRA over pipeline ranks trains as in one process, and is written for peft.

Tolerances are those of test_training.py.
"""

import peft
import pytest
import torch
from safetensors.torch import load_file

import zeroshard
from tests.parallel.pipeline.runs import (
    LAYOUTS,
    MODELS,
    agree,
    build,
    config_of,
    parameters_of,
    tokens_of,
    train,
    train_plainly,
)
from tests.parallel.pipeline.runs import start as pipelined
from zeroshard.parallel.pipeline.chunked import outline_of

STEPS = range(3)


def adapted(name, **options):
    """A model with adapters that change its outputs from the start."""
    targets = ["c_attn", "c_proj", "c_fc"] if "gpt" in name else ["q_proj", "v_proj", "o_proj", "down_proj"]
    targets += options.pop("targets", [])
    lora = peft.LoraConfig(
        r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out="gpt" in name, **options
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(MODELS[name](), lora).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.2)  # large adapters magnify rounding in float32
    return model


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.01, momentum=0.9)


def start(layout, model, **config):
    return pipelined(model, config_of(layout, **config), sgd)


def trained(layout, folder, stage, name, options):
    engine = start(layout, adapted(name, **options), stage=stage)
    found = (*train(engine, STEPS), parameters_of(engine))
    engine.save_pretrained(folder)
    engine.close(restore=False)
    return found


def compare(ranks, folder, layout, stage, name, **options):
    model = adapted(name, **options)
    batches = (({"input_ids": tokens}, tokens) for tokens in map(tokens_of, STEPS))
    losses, norms = train_plainly(model, batches, make=sgd, max_norm=0.5)
    want = losses, norms, dict(model.named_parameters(remove_duplicate=False))
    agree(ranks(LAYOUTS[layout][0], trained, layout, folder, stage, name, options), want)
    model.save_pretrained(folder / "plain")
    written, expected = (
        load_file(place / "adapter_model.safetensors") for place in (folder, folder / "plain")
    )
    assert written.keys() == expected.keys()
    read = peft.PeftModel.from_pretrained(build(name), folder).double()
    tokens = tokens_of(0)
    torch.testing.assert_close(
        read(input_ids=tokens).logits, model(input_ids=tokens).logits, rtol=0, atol=1e-5
    )


@pytest.mark.long_where(name=["llama"])
@pytest.mark.parametrize(("layout", "stage", "name"), [("pp 2", 3, "tied gpt"), ("pp 2 x tp 2", 1, "llama")])
def test_adapters_train_as_in_one_process_and_peft_reads_them(ranks, tmp_path, layout, stage, name):
    compare(ranks, tmp_path, layout, stage, name)


def save(folder):
    engine = start("pp 2", adapted("tied gpt"), checkpoint={"frozen": False})
    train(engine, [0])
    engine.save_checkpoint(folder, "saved")
    found = train(engine, [1, 2])
    engine.close(restore=False)
    return found


def load(folder):
    model = adapted("tied gpt")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    config = {"checkpoint": {"frozen": False}, "clip_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    engine = zeroshard.initialize(model, sgd, config).engine
    engine.load_checkpoint(folder, "saved")
    found = train(engine, [1, 2])
    engine.close(restore=False)
    return found


def test_the_outline_of_a_model_with_adapters_has_the_names_in_the_wrapped_model():
    outline = outline_of(adapted("tied gpt"))
    inside = "base_model.model.transformer"
    assert outline.before == tuple(f"{inside}.{name}" for name in ("wte", "wpe", "drop"))
    assert outline.blocks == tuple(f"{inside}.h.{number}" for number in range(4))
    assert outline.after == (f"{inside}.ln_f", "base_model.model.lm_head")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            r"got adapter 'default' \(PROMPT_TUNING\), which depends on the tokens",
        ),
        (
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[1, 2]),
            r"got adapter 'default' \(LORA\), which depends on the tokens",
        ),
    ],
)
def test_adapters_that_depend_on_the_tokens_are_refused_by_name(config, text):
    with pytest.raises(ValueError, match=text):
        outline_of(peft.get_peft_model(MODELS["llama"](), config))


def stream(layout, stage, name):
    """The stream with merged adapters, and on rank 0 the state that peft is to merge."""
    engine = start(layout, adapted(name), stage=stage)
    train(engine, [0])
    got = {key: values.clone() for key, values in engine.named_full_parameters(merge_adapters=True)}
    state = engine.full_state_dict()
    engine.close(restore=False)
    return got, state


def test_a_stream_has_the_merged_parameters_of_all_parts_on_all_ranks(ranks):
    (got, state), *others = ranks(2, stream, "pp 2", 3, "llama")
    model = adapted("llama")
    model.load_state_dict(state)
    want = dict(model.merge_and_unload().named_parameters())
    for found in (got, *(found for found, _ in others)):
        assert found.keys() == want.keys()
        assert all(torch.equal(found[key], want[key]) for key in want)
