"""Frozen weights with 4 and 8 bits beside other parts of the engine: averages, loss scales, pipelines."""

import pytest
import torch
import transformers

import zeroshard
from tests.ranks import on_ranks
from tests.sharding.test_quantized import adamw, build, llama, plain, same_state, tokens_of, train
from tests.sharding.test_quantized_by_parts import config_of, from_file, theirs, with_adapters

KINDS = ["nf4 twice", "int8"]


def train_loss(engine):
    tokens = tokens_of(9)
    return engine.eval_batch({"input_ids": tokens}, tokens).item()


def with_threshold(kind, threshold):
    model = build(kind)
    for layer in model.modules():
        if hasattr(layer, "state") and hasattr(layer.state, "threshold"):
            layer.state.threshold = threshold
    return model


@pytest.mark.long_where(threshold=[0.5])
@pytest.mark.parametrize("threshold", [0.5, 6.0])
@on_ranks(2)
def test_outliers_of_8_bits_are_computed_as_in_one_process(threshold):
    model = with_threshold("int8", threshold)

    def evaluated():
        model.eval()
        with torch.no_grad():
            loss = model(input_ids=tokens_of(9), labels=tokens_of(9)).loss.item()
        model.train()
        return loss

    want = evaluated(), plain(model, range(2), 2), evaluated()
    engine = zeroshard.initialize(with_threshold("int8", threshold), adamw, {"stage": 3}).engine
    assert (train_loss(engine), train(engine, range(2)), train_loss(engine)) == want


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
