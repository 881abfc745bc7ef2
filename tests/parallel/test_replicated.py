"""Frozen parameters that are whole on each rank, of models over tensor and pipeline ranks."""

import pytest
import torch

import zeroshard
from tests.parallel.pipeline import runs as pipelined


def pipeline(frozen):
    """Losses, the names of replicated parameters, and the gathers of a batch."""
    torch.manual_seed(0)
    model = pipelined.build("tied llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "layers.3" not in name)
    config = {"stage": 3, "mesh": {"pp": 2}, "frozen": frozen, "clip_grad_norm": 0.5}
    config["pipeline"] = {"num_microbatches": 4, "balance": "memory"}
    engine = zeroshard.initialize(model, pipelined.sgd, config).engine
    found = pipelined.train(engine, range(3))
    names = {
        original.fqn
        for buffer in engine._runtime.buffers
        for original in buffer.originals
        if not buffer.trainable and buffer.is_resident
    }
    return found, names


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_pipeline_ranks_replicate_a_tied_parameter_by_any_of_its_names(ranks, num_ranks):
    """`lm_head` is the embedding, which the first pipeline rank has under that name alone."""
    want = ranks(num_ranks, pipeline, "shard")
    got = ranks(num_ranks, pipeline, ["lm_head", "layers.3"])
    assert [losses for losses, _ in got] == [losses for losses, _ in want]
    half = num_ranks // 2
    for rank, (_, names) in enumerate(got):
        assert "model.embed_tokens.weight" in names
        assert any("layers.3" in name for name in names) == (rank >= half)
    if num_ranks > 2:
        assert all(not names for _, names in want)
