"""Frozen weights with 4 and 8 bits beside other parts of the engine: averages, loss scales, pipelines."""

import pytest
import torch
import transformers

import zeroshard
from tests.sharding.test_quantized import adamw, build, llama, plain, same_bits, same_state, tokens_of, train
from tests.sharding.test_quantized_by_parts import config_of, from_file, theirs, with_adapters

KINDS = ["nf4 twice", "int8"]
DECAY = 0.75


def averaged(kind, stage):
    engine = zeroshard.initialize(build(kind), adamw, {"stage": stage}).engine
    ema = zeroshard.EMA(engine, DECAY)
    states = []
    for number in range(3):
        train(engine, [number])
        states.append(engine.full_state_dict())
    with ema.applied():
        average, loss = engine.full_state_dict(), train_loss(engine)
    same_state(engine.full_state_dict(), states[-1])
    return states, average, loss


def train_loss(engine):
    tokens = tokens_of(9)
    return engine.eval_batch({"input_ids": tokens}, tokens).item()


@pytest.mark.long_where(kind=["int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.long)])
def test_an_average_has_the_codes_of_the_model(ranks, kind, stage):
    model = build(kind)
    (states, average, loss), (*_, other_loss) = ranks(2, averaged, kind, stage)
    for name, value in states[0].items():
        want = value.clone()
        if "lora_" in name:
            for state in states[1:]:
                want.lerp_(state[name], 1 - DECAY)
        assert same_bits(average[name], want), name
    model.load_state_dict({name: value for name, value in average.items() if "lora_" in name}, strict=False)
    model.eval()
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):  # zeroshard does not pack weights in an evaluation
            layer.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        assert loss == other_loss == model(input_ids=tokens_of(9), labels=tokens_of(9)).loss.item()


def scaled(kind, stage):
    """Train in float16 from a loss scale that is too large for the first steps."""
    precision = {"param_dtype": "fp16", "loss_scale": {"start": 2.0**40, "window": 100}}
    config = {"stage": stage, "precision": precision}
    engine = zeroshard.initialize(build(kind), adamw, config).engine
    found = []
    for number in range(24):
        tokens = tokens_of(number).chunk(engine.dp_world_size)[engine.dp_rank]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        stepped = engine.step()
        found.append((stepped, engine.loss_scale))
    return found, engine.full_state_dict()


@pytest.mark.long
@pytest.mark.long_where(kind=["nf4 twice"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.long)])
def test_steps_that_overflow_in_float16_are_skipped_at_each_stage_alike(ranks, kind, stage):
    (want, want_state), *_ = ranks(2, scaled, kind, 0)
    results = ranks(2, scaled, kind, stage)
    assert [found for found, _ in results] == [want, want]
    same_state(results[0][1], want_state)
    assert want[0][0] is False
    assert want[-1][0] is True
    for name, value in dict(build(kind).state_dict()).items():
        if "lora_" in name:
            assert not torch.equal(want_state[name], value), name
        elif not value.is_floating_point():
            assert same_bits(want_state[name], value), name


def with_threshold(kind, threshold):
    model = build(kind)
    for layer in model.modules():
        if hasattr(layer, "state") and hasattr(layer.state, "threshold"):
            layer.state.threshold = threshold
    return model


def evaluated_and_trained(threshold):
    engine = zeroshard.initialize(with_threshold("int8", threshold), adamw, {"stage": 3}).engine
    return train_loss(engine), train(engine, range(2)), train_loss(engine)


@pytest.mark.long_where(threshold=[0.5])
@pytest.mark.parametrize("threshold", [0.5, 6.0])
def test_outliers_of_8_bits_are_computed_as_in_one_process(ranks, threshold):
    model = with_threshold("int8", threshold)

    def evaluated():
        model.eval()
        with torch.no_grad():
            loss = model(input_ids=tokens_of(9), labels=tokens_of(9)).loss.item()
        model.train()
        return loss

    want = evaluated(), plain(model, range(2), 2), evaluated()
    assert ranks(2, evaluated_and_trained, threshold) == [want, want]


def from_seed(_, kind):
    torch.manual_seed(0)
    with zeroshard.deferred_init():
        model = transformers.LlamaForCausalLM(llama())
        return with_adapters(zeroshard.quantize(model, config_of(kind)))


def over_parts(build, schedule, stage, path, kind):
    mesh = {"pp": 2}
    config = {"stage": stage, "mesh": mesh, "pipeline": {"schedule": schedule, "num_microbatches": 2}}
    engine = zeroshard.initialize(build(path, kind), adamw, config).engine
    return train(engine, range(3)), engine.full_state_dict()


@pytest.mark.long_where(build=[from_seed])
@pytest.mark.long_where(build=[from_file], kind=["nf4 twice"])
@pytest.mark.long_where(build=[from_seed], kind=["int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [from_file, from_seed])
@pytest.mark.parametrize(
    ("num_ranks", "schedule", "stage"), [(2, "1f1b", 3), pytest.param(4, "zb-h1", 2, marks=pytest.mark.long)]
)
def test_pipeline_ranks_quantize_their_parts_of_a_model_without_memory(
    ranks,
    tmp_path,
    kind,
    build,
    num_ranks,
    schedule,
    stage,
):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(llama()).save_pretrained(tmp_path)
    model = theirs(tmp_path, kind)
    want = plain(model, range(3), num_ranks)
    for losses, found in ranks(num_ranks, over_parts, build, schedule, stage, tmp_path, kind):
        assert losses == (
            want if num_ranks == 2 else pytest.approx(want, rel=1e-6)
        )  # other sums of gradients
        if found and num_ranks == 2:
            same_state(found, dict(model.state_dict()))
