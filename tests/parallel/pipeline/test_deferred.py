"""Pipelines over models without memory: the values of the whole model, each rank with its part alone."""

from unittest import mock

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
from tests.ranks import on_ranks
from zeroshard.safetensors import FileTensor


@pytest.mark.long_where(name=["tied llama"])
@pytest.mark.parametrize(
    ("num_ranks", "layout", "name"), [(2, "pp 2", "tied gpt"), (4, "pp 2 x tp 2", "tied llama")]
)
@on_ranks()
def test_a_model_that_was_never_in_memory_trains_as_the_same_one_in_one_process(num_ranks, layout, name):
    model = build(name)
    wanted, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    torch.manual_seed(0)
    with zeroshard.deferred_init():
        deferred = MODELS[name]().double()
    engine = start(deferred, config_of(layout))
    assert all(torch.equal(value, wanted[key]) for key, value in parameters_of(engine).items())
    own = dict(engine.module.named_buffers())
    assert own or "gpt" in name  # which has no buffers; others have rotary tables
    assert all(torch.equal(value, buffers[key]) for key, value in own.items())
    found = (*train(engine, range(3)), parameters_of(engine))
    agree([found], plain(name, range(3)), whole=False)


# -------------------------------------------------------------------------------------------- from files


def loaded(folder, layout, stage):
    """The first values of a rank's part, and the bytes that it read."""
    read, original = [], FileTensor.read

    def noted(self, *spans):
        read.append(sum(span.size for span in spans) * self.file_dtype.itemsize)
        return original(self, *spans)

    with mock.patch.object(FileTensor, "read", noted):
        model = zeroshard.from_pretrained(transformers.AutoModelForCausalLM, folder)
        engine = start(model, config_of(layout, stage))
    held = sum(parameter.numel() * 4 for parameter in engine.parameters())
    state = parameters_of(engine)
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
