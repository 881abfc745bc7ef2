"""Checkpoints of models that are cut over pipeline ranks: read and written under any layout."""

import json

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.checkpoint.runs import read_whole
from tests.parallel.pipeline.runs import LAYOUTS, config_of, parameters_of, start, train
from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.tensors import open_checkpoint
from zeroshard.optim import AdamW8bit


def two_groups(parameters):
    """Groups that differ between parts: one has no vectors of some kinds, and so on."""
    matrices = [p for p in parameters if p.dim() > 1 and p.shape[0] != p.shape[1]]
    others = [p for p in parameters if not any(p is matrix for matrix in matrices)]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": matrices}], lr=1e-2)


OPTIMIZERS = {
    "AdamW": two_groups,
    "8-bit": lambda parameters: AdamW8bit(parameters, lr=1e-2, min_8bit_size=0),
}


def begin(layout, name, kind, stage, seed=0):
    return start(name, config_of(layout, stage), OPTIMIZERS[kind], seed)


def save(folder, layout, name, kind, stage):
    engine = begin(layout, name, kind, stage)
    train(engine, range(2))
    engine.save_checkpoint(folder, "saved", {"note": 1})
    found = train(engine, range(2, 4))
    engine.close(restore=False)
    return found


def load(folder, layout, name, kind, stage):
    engine = begin(layout, name, kind, stage, seed=1 + dist.get_rank())
    note = engine.load_checkpoint(folder, "saved")
    engine.save_checkpoint(folder / f"again {layout}", "saved", note)
    found = note, train(engine, range(2, 4))
    engine.close(restore=False)
    return found


def facts(folder):
    """The tensors of a checkpoint, and what its manifest tells of the model and of groups, in any order."""
    directory = find(folder, "saved")
    stored = open_checkpoint(directory)
    values = json.loads((directory / "values.json").read_text())
    parameters = {
        name: (record.shape, record.dtype, sorted(record.aliases))
        for name, record in stored.manifest.parameters.items()
    }
    return read_whole(stored), parameters, values.get("client_state")


def exchange(ranks, tmp_path, before, after, name, kind="AdamW", stages=(3, 1)):
    losses, norms = ranks(LAYOUTS[before][0], save, tmp_path, before, name, kind, stages[0])[0]
    for note, (again, norms_again) in ranks(LAYOUTS[after][0], load, tmp_path, after, name, kind, stages[1]):
        assert note == {"note": 1}
        assert again == pytest.approx(losses, rel=1e-6)
        assert norms_again == pytest.approx(norms, rel=1e-6)
    tensors, *others = facts(tmp_path)
    tensors_again, *others_again = facts(tmp_path / f"again {after}")
    assert others == others_again
    assert tensors.keys() == tensors_again.keys()
    for key, value in tensors.items():
        assert torch.equal(value, tensors_again[key]), key


@pytest.mark.long_where(before=["pp 2 x tp 2"])
@pytest.mark.parametrize(("before", "after"), [("pp 2", "1x1x1"), ("pp 2 x tp 2", "pp 2 x dp 2")])
def test_a_checkpoint_goes_from_layout_to_layout_to_the_bit(ranks, tmp_path, before, after):
    exchange(ranks, tmp_path, before, after, "tied gpt")


# --------------------------------------------------------------------------------- for transformers


def export(folder, layout, name):
    engine = begin(layout, name, "AdamW", 3)
    train(engine, range(2))
    engine.save_pretrained(folder)
    state = parameters_of(engine)
    engine.close(restore=False)
    return state


@pytest.mark.long_where(layout=["pp 2 x tp 2"])
@pytest.mark.parametrize(("layout", "name"), [("pp 2", "tied gpt"), ("pp 2 x tp 2", "llama")])
def test_transformers_reads_the_whole_model_that_pipeline_ranks_have_trained(ranks, tmp_path, layout, name):
    found = {}
    for state in ranks(LAYOUTS[layout][0], export, tmp_path, layout, name):
        found |= state
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    read = dict(model.named_parameters(remove_duplicate=False))
    assert read.keys() == found.keys()
    for key, value in found.items():
        assert torch.equal(read[key], value), key
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
