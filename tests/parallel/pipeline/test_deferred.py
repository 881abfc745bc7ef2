"""Pipelines over models without memory: the values of the whole model, each rank with its part alone."""

import pytest
import torch
import transformers

import zeroshard
from tests.parallel.pipeline.runs import (
    LAYOUTS,
    MODELS,
    agree,
    build,
    config_of,
    parameters_of,
    plain,
    start,
    train,
)
from zeroshard.safetensors import FileTensor


def trained(layout, name, balance):
    torch.manual_seed(0)
    with zeroshard.deferred_init():
        model = MODELS[name]().double()
    config = config_of(layout)
    engine = start(model, config | {"pipeline": config["pipeline"] | {"balance": balance}})
    first = parameters_of(engine)
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    found = first, buffers, (*train(engine, range(3)), parameters_of(engine))
    engine.close(restore=False)
    return found


@pytest.mark.long_where(name=["tied llama"])
@pytest.mark.parametrize(
    ("layout", "name", "balance"), [("pp 2", "tied gpt", "memory"), ("pp 2 x tp 2", "tied llama", "time")]
)
def test_a_model_that_was_never_in_memory_trains_as_the_same_one_in_one_process(ranks, layout, name, balance):
    model = build(name)
    wanted, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    found = ranks(LAYOUTS[layout][0], trained, layout, name, balance)
    for first, own, _ in found:
        assert all(torch.equal(value, wanted[key]) for key, value in first.items())
        assert own or "gpt" in name  # which has no buffers; others have rotary tables
        assert all(torch.equal(value, buffers[key]) for key, value in own.items())
    agree([run for *_, run in found], plain(name, range(3)))


# -------------------------------------------------------------------------------------------- from files


def loaded(folder, layout, stage):
    """The first values of a rank's part, and the bytes that it read."""
    read, original = [], FileTensor.read

    def noted(self, *spans):
        read.append(sum(span.size for span in spans) * self.file_dtype.itemsize)
        return original(self, *spans)

    FileTensor.read = noted
    try:
        model = zeroshard.from_pretrained(transformers.AutoModelForCausalLM, folder)
        engine = start(model, config_of(layout, stage))
    finally:
        FileTensor.read = original
    held = sum(parameter.numel() * 4 for parameter in engine.parameters())
    state = parameters_of(engine)
    engine.close(restore=False)
    return state, sum(read), held


@pytest.mark.long_where(layout=["pp 2 x tp 2"])
@pytest.mark.parametrize(("layout", "name"), [("pp 2", "tied llama"), ("pp 2 x tp 2", "llama")])
def test_each_rank_reads_the_bytes_of_its_part_of_the_files(ranks, tmp_path, layout, name):
    torch.manual_seed(0)
    model, found = MODELS[name](), {}
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for state, num_read, held in ranks(LAYOUTS[layout][0], loaded, tmp_path, layout, 3):
        assert all(torch.equal(value, wanted[key]) for key, value in state.items())
        assert num_read == held
        found |= state
    assert found.keys() == wanted.keys()
