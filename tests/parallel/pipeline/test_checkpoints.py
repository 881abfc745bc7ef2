"""Checkpoints, averages and exports of models that are cut over pipeline ranks, under any layout."""

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard
from tests.checkpoint.runs import read_whole
from tests.distributed.training import different
from tests.parallel.pipeline.runs import LAYOUTS, config_of, parameters_of, start, train
from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.tensors import open_checkpoint

DECAY = 0.8


def two_groups(parameters):
    """Groups that differ between parts: one has no vectors of some kinds, and so on."""
    matrices = [p for p in parameters if p.dim() > 1 and p.shape[0] != p.shape[1]]
    others = [p for p in parameters if not any(p is matrix for matrix in matrices)]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": matrices}], lr=1e-2)


def begin(layout, name, stage, seed=0):
    engine = start(name, config_of(layout, stage), two_groups, seed)
    return engine, zeroshard.EMA(engine, DECAY)


def shown(engine, ema):
    """The averages on rank 0; a stream has them on all ranks."""
    with ema.applied():
        state = engine.full_state_dict()
        streamed = {key: values.clone() for key, values in engine.named_full_parameters()}
    assert len(streamed) > 20
    assert all(torch.equal(state[key], values) for key, values in streamed.items() if state)
    return state


def save(folder, layout, name):
    """Losses after a checkpoint, the averages in it, and torch's own over the states after each step."""
    (engine, ema), reference = begin(layout, name, 3), None
    for number in range(2):
        train(engine, [number])
        state = engine.full_state_dict()
        model = torch.nn.ParameterDict({key.replace(".", "/"): value for key, value in state.items()})
        reference = reference or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        if state:
            reference.update_parameters(model)
    engine.save_checkpoint(folder, "saved", {"note": 1})
    averages, again = shown(engine, ema), engine.full_state_dict()
    assert all(torch.equal(again[key], state[key]) for key in state.keys() | again.keys())
    found = train(engine, range(2, 4))
    return found, averages, {key.replace("/", "."): p.detach() for key, p in reference.module.items()}


def load(folder, layout, name):
    engine, ema = begin(layout, name, 1, seed=1 + dist.get_rank())
    note = engine.load_checkpoint(folder, "saved")
    engine.save_checkpoint(folder / "again", "saved", note)
    averages = shown(engine, ema)
    return train(engine, range(2, 4)), averages, note


def facts(folder):
    """The tensors of a checkpoint, and what its manifest tells of the model."""
    stored = open_checkpoint(find(folder, "saved"))
    parameters = {
        name: (record.shape, record.dtype, sorted(record.aliases))
        for name, record in stored.manifest.parameters.items()
    }
    return read_whole(stored), parameters


@pytest.mark.long_where(before=["pp 2 x tp 2"])
@pytest.mark.parametrize(
    ("before", "after", "name"), [("pp 2", "1x1x1", "tied gpt"), ("pp 2 x tp 2", "pp 2 x dp 2", "llama")]
)
def test_checkpoints_and_averages_go_from_layout_to_layout_to_the_bit(ranks, tmp_path, before, after, name):
    (losses, norms), averages, want = ranks(LAYOUTS[before][0], save, tmp_path, before, name)[0]
    assert different(averages, want) == []
    found = ranks(LAYOUTS[after][0], load, tmp_path, after, name)
    assert different(found[0][1], want) == []
    for (losses_again, norms_again), _, note in found:
        assert note == {"note": 1}
        assert losses_again == pytest.approx(losses, rel=1e-6)
        assert norms_again == pytest.approx(norms, rel=1e-6)
    (tensors, parameters), (tensors_again, parameters_again) = facts(tmp_path), facts(tmp_path / "again")
    assert parameters == parameters_again
    assert different(tensors, tensors_again) == []


# --------------------------------------------------------------------------------- for transformers


def export(folder, layout, name):
    engine, _ = begin(layout, name, 3)
    train(engine, range(2))
    engine.save_pretrained(folder)
    return parameters_of(engine)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "name"), [("pp 2", "tied gpt"), ("pp 2 x tp 2", "llama")])
def test_transformers_reads_the_whole_model_that_pipeline_ranks_have_trained(ranks, tmp_path, layout, name):
    found = {}
    for state in ranks(LAYOUTS[layout][0], export, tmp_path, layout, name):
        found |= state
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert different(dict(model.named_parameters(remove_duplicate=False)), found) == []
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
