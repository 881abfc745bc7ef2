"""Live export: a stream of full parameters on every rank is what `full_state_dict` tells, to the bit."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from tests.distributed.training import SOME_STAGES, build, start, step, token_loss, unequal
from tests.ranks import on_ranks


def whole_state(engine):
    """What `full_state_dict` tells on rank 0, on every rank."""
    states = [engine.full_state_dict()]
    dist.broadcast_object_list(states)
    return states[0]


@on_ranks(2)
def test_the_stream_is_the_full_state_to_the_bit():
    found = []
    for stage in SOME_STAGES:
        model = build("tied Llama")
        names = [name for name, _ in model.named_parameters()]
        engine, optimizer = start(model, stage=stage)
        for number in range(2):
            step(engine, optimizer, token_loss, number)
        want = {name: whole_state(engine)[name] for name in names}
        got = {name: values.clone() for name, values in engine.named_full_parameters()}
        found += unequal(f"stage {stage}", got, want)
        half = dict(engine.named_full_parameters("bf16"))
        found += unequal(f"stage {stage}, bf16", half, {n: v.bfloat16() for n, v in want.items()})
        assert {values.dtype for values in half.values()} == {torch.bfloat16}
        found += unequal(f"stage {stage}, after", whole_state(engine), whole_state(engine) | want)
        step(engine, optimizer, token_loss, 3)
    return found


@on_ranks(2)
def test_a_stream_does_not_mix_parameters_with_averages_or_later_ones(tmp_path):
    """The refusals of streams that go on after main parameters have changed, and the stream after them."""
    engine, optimizer = start(build("tied Llama"))
    ema = zeroshard.EMA(engine, 0.5)
    step(engine, optimizer, token_loss, 0)
    engine.save_checkpoint(tmp_path)
    refused = []

    def goes_on(stream):
        with pytest.raises(RuntimeError, match="parameters have changed since the stream began"):
            list(stream)
        refused.append(True)

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
    assert (len(refused), list(unequal("after", got, {name: want[name] for name in got}))) == (5, [])


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


@on_ranks(2)
def test_prompts_and_wrong_arguments_are_refused_by_name():
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    engine, _ = start(peft.get_peft_model(build("transformers Llama"), config), stage=3)
    with pytest.raises(ValueError, match=r"adapter 'default' \(PROMPT_TUNING\) is a prompt"):
        engine.named_full_parameters(merge_adapters=True)
    with pytest.raises(ValueError, match="dtype"):
        engine.named_full_parameters("float33")
    with engine.unsharded(), pytest.raises(RuntimeError, match=r"inside engine\.unsharded"):
        engine.named_full_parameters()


def live_bytes():
    """The bytes of all plain tensors of this process, each storage once."""
    gc.collect()
    storages = {
        (storage := tensor.untyped_storage())._cdata: storage.nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is Tensor
    }
    return sum(storages.values())


@on_ranks(2)
def test_one_unit_is_held_at_a_time():
    engine, _ = start(build("Llama", num_blocks=6), stage=3)
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
