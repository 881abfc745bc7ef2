"""Full parameters: a stream of all on every rank, and one parameter, gradient or state by name."""

import copy
import re

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.distributed.models import Layered
from tests.distributed.training import (
    build,
    live_bytes,
    start,
    step,
    take_steps,
    token_loss,
    unequal,
)
from tests.ranks import on_ranks


def whole_state(engine):
    """What `full_state_dict` tells on rank 0, on every rank."""
    states = [engine.full_state_dict()]
    dist.broadcast_object_list(states)
    return states[0]


@on_ranks(2)
def test_the_stream_is_the_full_state_to_the_bit():
    found = []
    model = build("tied Llama", width=24)
    names = [name for name, _ in model.named_parameters()]
    engine, optimizer = start(model)
    step(engine, optimizer, token_loss, 0)
    want = {name: whole_state(engine)[name] for name in names}
    got = {name: values.clone() for name, values in engine.named_full_parameters()}
    found += unequal("stage 3", got, want)
    half = dict(engine.named_full_parameters("bf16"))
    found += unequal("bf16", half, {n: v.bfloat16() for n, v in want.items()})
    step(engine, optimizer, token_loss, 1)
    return found


@on_ranks(2)
def test_a_stream_does_not_mix_parameters_with_averages_or_later_ones(tmp_path):
    """The refusals of streams that go on after main parameters have changed, and the stream after them."""
    engine, optimizer = start(build("tied Llama", width=24))
    ema = zeroshard.EMA(engine, 0.5)
    step(engine, optimizer, token_loss, 0)
    engine.save_checkpoint(tmp_path)

    def goes_on(stream):
        with pytest.raises(RuntimeError, match="parameters have changed since the stream began"):
            list(stream)

    with ema.applied():
        stream, other = engine.named_full_parameters(), engine.named_full_parameters()
        next(stream)
    goes_on(stream)
    goes_on(other)
    stream = engine.named_full_parameters()
    next(stream)
    with ema.applied():
        goes_on(stream)
    for change in (
        lambda: step(engine, optimizer, token_loss, 2),
        lambda: engine.load_checkpoint(tmp_path),
    ):
        stream = engine.named_full_parameters()
        next(stream)
        change()
        goes_on(stream)
    got = {name: values.clone() for name, values in engine.named_full_parameters()}
    want = whole_state(engine)
    return list(unequal("after", got, {name: want[name] for name in got}))


LORA = {
    "dora": {"use_dora": True},
    "saved embedding, tied": {"modules_to_save": ["embed_tokens"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [1, 5]},
}


def adapted(how):
    import peft

    lora = peft.LoraConfig(
        **{"r": 3, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | LORA[how]
    )
    model = build("tied transformers Llama" if "tied" in how else "transformers Llama")
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora)


@on_ranks(2)
def test_adapters_are_merged_on_the_way_as_peft_merges_them():
    """Differences of a stream with merged adapters from what peft merges in one process."""
    found = []
    for how in LORA:
        plain = adapted(how)
        engine, optimizer = start(copy.deepcopy(plain), "SGD", stage=3)
        step(engine, optimizer, token_loss, 0)
        before = whole_state(engine)
        got = {n: v.clone() for n, v in engine.named_full_parameters(merge_adapters=True)}
        plain.load_state_dict(before)
        want = dict(plain.merge_and_unload().named_parameters())
        found += unequal(how, got, want)
        assert not any("lora" in name or "base_layer" in name for name in got)
        found += unequal(f"{how}, after", whole_state(engine), before)
        apart = {name for name, _ in engine.named_full_parameters()}
        assert apart == {name for name, _ in engine.named_parameters()}
    return found


@on_ranks(1)
def test_tensors_that_adapters_share_are_in_no_merged_model():
    import peft

    bank = {"num_vectors": 4, "vector_length": 7, "topk": 2}
    config = peft.VBLoRAConfig(r=2, target_modules=["q_proj"], **bank)
    model = peft.get_peft_model(build("transformers Llama"), config)
    engine, _ = start(copy.deepcopy(model), "SGD", stage=3)
    got = {name for name, _ in engine.named_full_parameters(merge_adapters=True)}
    assert got == {name for name, _ in model.merge_and_unload().named_parameters()}


@on_ranks(2)
def test_prompts_and_wrong_arguments_are_refused_by_name():
    import peft

    before = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for prompt, kind in ((before, "ADAPTION_PROMPT"), (config, "PROMPT_TUNING")):
        engine, _ = start(peft.get_peft_model(build("transformers Llama"), prompt), stage=3)
        with pytest.raises(ValueError, match=rf"adapter 'default' \({kind}\) is a prompt"):
            engine.named_full_parameters(merge_adapters=True)
    with pytest.raises(ValueError, match="dtype"):
        engine.named_full_parameters("float33")
    config = peft.LNTuningConfig(target_modules=["input_layernorm"])
    other, _ = start(peft.get_peft_model(build("transformers Llama"), config), stage=3)
    with pytest.raises(ValueError, match=r"got LN tuning at '.*0\.input_layernorm'"):
        other.named_full_parameters(merge_adapters=True)
    with engine.unsharded(), pytest.raises(RuntimeError, match=r"inside engine\.unsharded"):
        engine.named_full_parameters()


@on_ranks(2)
def test_one_unit_is_held_at_a_time():
    engine, _ = start(build("Llama", num_blocks=3), stage=3)
    largest = 4 * max(unit.numel for unit in engine.units)
    total, before, most = 4 * sum(unit.numel for unit in engine.units), live_bytes(), 0
    sent = []
    for _, values in engine.named_full_parameters():
        most = max(most, live_bytes() - before)
        sent.append(engine.comm_report().bytes_sent["all_gather"])
        del values
    assert len(set(sent)) == len(engine.units), "expected a gather for each unit, when it is asked for"
    assert live_bytes() == before
    assert 0 < most <= largest < total / 2


@on_ranks(2)
def test_unknown_names_and_values_that_do_not_fit_are_refused_on_all_ranks():
    (engine, _), rank = start(Layered(), stage=3), dist.get_rank()

    def refused(words, call, *args, kind=ValueError):
        with pytest.raises(kind, match=re.escape(words)):
            call(*args)

    name, whole = "blocks.0.0.weight", torch.zeros(90, 7)
    before = engine.full_parameter(name).clone()
    refused("got 'blocks.0.0.wieght'", engine.full_parameter, "blocks.0.0.wieght")
    refused("got None", engine.full_gradient, None)
    one_name = f"expected one name on all ranks: rank(s) 0 have blocks.1.0.weight; rank(s) 1 have {name}"
    refused(one_name, engine.full_parameter, name if rank else "blocks.1.0.weight")
    shape = f"'{name}': expected a full tensor of shape (90, 7), got shape (630,)"
    refused(shape, engine.set_full_parameter, name, torch.zeros(630))
    different = f"expected the same for '{name}' on every rank: rank(s) 0 have torch.float32 with checksum "
    refused(different, engine.set_full_parameter, name, whole + rank)
    assert torch.equal(engine.full_parameter(name), before)
    refused("'frozen.weight' is frozen", engine.set_full_gradient, "frozen.weight", torch.zeros(7, 7))
    none = f"expected states of '{name}' (none before the first step), got 'exp_avg'"
    refused(none, engine.set_full_optimizer_state, name, {"exp_avg": whole})
    take_steps(engine, [0])
    moments = f"the same for '{name}' on every rank: rank(s) 0 have exp_avg, exp_avg_sq, step, torch.float32 "
    refused(moments, engine.set_full_optimizer_state, name, {"exp_avg": whole + rank})
    after = f"expected states of '{name}' (step, exp_avg, exp_avg_sq), got 'exp_agv'"
    refused(after, engine.set_full_optimizer_state, name, {"exp_agv": whole})
    with engine.unsharded():
        inside = "full_parameter() inside engine.unsharded()"
        refused(inside, engine.full_parameter, name, kind=RuntimeError)
