"""Pipelines together with precisions, tiers, 8-bit states, hybrid sharding, recomputation, schedules."""

import functools
import math
import warnings

import pytest
import torch

import zeroshard
from tests.parallel.pipeline.runs import adamw, build, parameters_of, plain, start, tokens_of, train
from zeroshard.optim import LAMB, LARS, AdamW8bit, LAMB8bit, LARS8bit, Muon
from zeroshard.stepping.wholes import whole_shape

TIED = {"transformer.wte.weight", "model.embed_tokens.weight", "lm_head.weight"}
PIPELINE = {"pp": 2}, {"schedule": "1f1b", "num_microbatches": 2}


def run(name, config, make, numbers, pp):
    mesh, pipeline = PIPELINE
    options = {"mesh": mesh, "pipeline": pipeline} if pp else {"gradient_accumulation_steps": 2}
    engine = start(name, config | options, make)
    found = train(engine, numbers), parameters_of(engine)
    engine.close(restore=False)
    return found


def agree(ranks, num_ranks, name, config, make=adamw, numbers=range(4), *, rel=1e-6, absolute=1e-6):
    """Compare runs over pipeline ranks with runs over half as many ranks without them."""
    [((losses, norms), want), *_] = ranks(num_ranks // 2, run, name, config, make, numbers, False)
    whole, tied = {}, {}
    for (found, found_norms), state in ranks(num_ranks, run, name, config, make, numbers, True):
        assert found == pytest.approx(losses, rel=rel)
        assert found_norms == pytest.approx(norms, rel=rel)
        for key in TIED & state.keys() if "tied" in name else ():  # the same on both ranks that hold it
            assert torch.equal(tied.setdefault("", state[key]), state[key]), key
        whole |= state
        for key, value in state.items():
            torch.testing.assert_close(value, want[key], rtol=0, atol=absolute, msg=key)
    assert whole.keys() == want.keys()


def eightbit(parameters):
    return AdamW8bit(parameters, lr=1e-3, min_8bit_size=0)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_8_bit_states(ranks, stage):
    agree(ranks, 4, "tied gpt", {"stage": stage}, eightbit, absolute=1e-5)


@pytest.mark.long_where(stage=[1])
@pytest.mark.parametrize("stage", [1, 3])
def test_states_and_main_parameters_in_host_memory(ranks, stage, tmp_path):
    agree(ranks, 4, "tied gpt", {"stage": stage, "offload": {"optimizer": "cpu"}})


@pytest.mark.long
def test_states_in_files(ranks, tmp_path):
    offload = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": str(tmp_path)}
    agree(ranks, 4, "tied gpt", {"stage": 3, "offload": offload})


@pytest.mark.long
def test_hybrid_sharding(ranks):
    agree(ranks, 8, "tied llama", {"stage": 3, "shard_group_size": 2})


@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
def test_units_that_are_recomputed(ranks, stage):
    agree(ranks, 4, "tied llama", {"stage": stage, "recompute": "unit"})


@pytest.mark.long
def test_activations_in_host_memory(ranks):
    agree(ranks, 2, "tied llama", {"stage": 3, "recompute": "unit", "offload": {"activations": "cpu"}})


@pytest.mark.long
@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
def test_main_parameters_in_bfloat16_are_rounded_alike(ranks, stage):
    precision = {"param_dtype": "bf16", "main_dtype": "bf16"}
    agree(ranks, 4, "tied llama", {"stage": stage, "precision": precision}, rel=2e-2, absolute=2e-2)


# --------------------------------------------------------------------------------------- float16


def overflowing(scale):
    """A run in float16 whose first step overflows; whether each step was taken, and the scales."""
    mesh, pipeline = PIPELINE
    precision = {"param_dtype": "fp16", "loss_scale": "dynamic"}
    engine = start(
        "tied llama", {"stage": 3, "precision": precision, "mesh": mesh, "pipeline": pipeline}, adamw
    )
    facts = []
    for number in range(3):
        with torch.no_grad():
            if number == 1 and engine._axes.pp.rank == 1:  # the last pipeline rank alone overflows
                next(p for name, p in engine.named_parameters() if "layers.3.mlp" in name).fill_(scale)
        before = engine.loss_scale
        train(engine, [number])
        facts.append((engine.global_step, engine.skipped_steps, engine.loss_scale / before))
    engine.close(restore=False)
    return facts


@pytest.mark.long
def test_all_ranks_leave_out_a_step_that_overflows_on_one(ranks):
    first, *others = ranks(4, overflowing, 1e4)
    assert others == [first] * 3
    assert first[0][:2] == (1, 0)
    assert first[1] == (1, 1, 0.5)


def with_bad_gradients(bad, config):
    """The message about gradients that are nan, of some parameters alone."""
    engine = start("tied gpt", config | {"mesh": PIPELINE[0], "pipeline": PIPELINE[1]}, adamw)
    for name, parameter in engine.module.named_parameters():
        if name in bad:
            parameter.register_hook(lambda gradient: gradient * math.nan)
    told = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(engine, [0])
        except RuntimeError as error:
            told = str(error)
    steps = engine.global_step
    engine.close(restore=False)
    return told + "".join(str(one.message) for one in caught), steps


@pytest.mark.long_where(config=[{"precision": {"param_dtype": "fp16", "loss_scale": 8.0}}])
@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "config", [{"nonfinite": "error"}, {"precision": {"param_dtype": "fp16", "loss_scale": 8.0}}]
)
def test_all_ranks_name_the_gradients_that_are_not_finite(ranks, config, stage):
    first, tied, last = "transformer.h.0.ln_1.weight", "transformer.wte.weight", "transformer.ln_f.bias"
    for bad in ([first], [last], [first, tied, last]):
        names = ", ".join(map(repr, sorted(bad, key=[tied, first, last].index)))
        for told, steps in ranks(4, with_bad_gradients, bad, config | {"stage": stage}):
            assert f"not finite are the gradients of {names}. The step was " in told
            assert steps == 0


# ---------------------------------------------------------------------------------- compile, schedules


@pytest.mark.long
def test_compiled_units(ranks):
    agree(ranks, 2, "eager llama", {"stage": 3, "compile": True}, numbers=range(2))


def scheduled():
    mesh, pipeline = PIPELINE
    config = {"mesh": mesh, "pipeline": pipeline | {"balance": "memory"}}

    def halving(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    given = zeroshard.initialize(build("llama"), adamw, config, lr_scheduler=halving)
    train_no_norm(given.engine, range(3))
    return given.lr_scheduler.get_last_lr(), given.engine.global_step


def train_no_norm(engine, numbers):
    for number in numbers:
        tokens = tokens_of(number).chunk(engine.dp_world_size)[engine.dp_rank]
        engine.train_batch({"input_ids": tokens}, tokens)


def test_a_schedule_of_the_learning_rate_goes_on_with_each_batch(ranks):
    for rates, steps in ranks(2, scheduled):
        assert rates == [1e-3 / 8]
        assert steps == 3


# --------------------------------------------------------------------------------------- whole tensors


def muon(parameters):
    matrices, others = [], []
    for parameter in parameters:
        (matrices if len(whole_shape(parameter)) == 2 else others).append(parameter)
    return Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-2)


OF_WHOLES = {
    "LAMB": functools.partial(LAMB, lr=1e-2),
    "LARS": functools.partial(LARS, lr=0.5, weight_decay=0.01, trust_coefficient=0.02),
    "LAMB8bit": functools.partial(LAMB8bit, lr=1e-2, min_8bit_size=600),
    "LARS8bit": functools.partial(LARS8bit, lr=0.5, trust_coefficient=0.02, min_8bit_size=600),
    "Muon": muon,
}


@pytest.mark.long_where(stage=[0, 1, 2])
@pytest.mark.long_where(name=["LARS", "LARS8bit", "LAMB8bit"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", OF_WHOLES)
def test_each_holder_of_a_tied_weight_steps_it_by_the_whole(ranks, name, stage):
    check_wholes(ranks, name, {"stage": stage})


@pytest.mark.long
@pytest.mark.long_where(name=["LARS", "LARS8bit", "LAMB8bit", "Muon"])
@pytest.mark.parametrize("name", OF_WHOLES)
def test_each_tensor_rank_of_each_holder_steps_a_tied_weight_by_the_whole(ranks, name):
    check_wholes(ranks, name, {"stage": 1, "mesh": {"pp": 2, "tp": 2}})


def check_wholes(ranks, name, config):
    make, tied = OF_WHOLES[name], {}
    # Blocks of parts hold other elements than those of wholes; Muon iterates in bfloat16.
    relative, absolute = {"Muon": (1e-5, 3e-3), "LAMB": (1e-6, 1e-6), "LARS": (1e-6, 1e-6)}.get(
        name, (2e-3, 1e-2)
    )
    losses, _, want = plain("tied llama", range(3), make=make)
    options = {"mesh": PIPELINE[0], "pipeline": PIPELINE[1]} | config
    for (found, _), state in ranks(4, trained, options, make):
        assert found == pytest.approx(losses, rel=relative)
        for key, value in state.items():
            if key in TIED:
                assert torch.equal(tied.setdefault("", value), value), key
            torch.testing.assert_close(value, want[key], rtol=0, atol=absolute, msg=key)


def trained(config, make):
    engine = start("tied llama", config, make)
    found = train(engine, range(3)), parameters_of(engine)
    engine.close(restore=False)
    return found
