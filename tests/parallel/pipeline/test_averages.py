"""Moving averages of models that are cut over pipeline and tensor ranks: those of one process."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard
from tests.parallel.pipeline.runs import LAYOUTS, adamw, config_of, start, train

DECAY = 0.8


def begin(layout, name, stage, seed=0):
    return start(name, config_of(layout, stage), adamw, seed)


def averaged(folder, layout, name, stage):
    """The averages that a run shows, and torch's own over what `full_state_dict` tells after each step."""
    engine = begin(layout, name, stage)
    ema, reference = zeroshard.EMA(engine, DECAY), None
    for number in range(3):
        train(engine, range(number, number + 1))
        state = engine.full_state_dict()
        model = torch.nn.ParameterDict({key.replace(".", "/"): value for key, value in state.items()})
        reference = reference or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        if state:
            reference.update_parameters(model)
    engine.save_checkpoint(folder, "saved")
    trained = engine.full_state_dict()
    with ema.applied():
        shown = engine.full_state_dict()
        streamed = {key: values.clone() for key, values in engine.named_full_parameters()}
    assert all(torch.equal(shown[key], values) for key, values in streamed.items() if shown)
    assert "transformer.h.3.mlp.c_fc.weight" in streamed or "model.layers.3.mlp.up_proj.weight" in streamed
    again = engine.full_state_dict()
    engine.close(restore=False)
    assert again.keys() == trained.keys()
    assert all(torch.equal(again[key], trained[key]) for key in trained)
    return shown, {key.replace("/", "."): p.detach() for key, p in reference.module.items()}


def load(folder, layout, name, stage):
    engine = begin(layout, name, stage, seed=1)
    ema = zeroshard.EMA(engine, DECAY)
    engine.load_checkpoint(folder, "saved")
    with ema.applied():
        shown = engine.full_state_dict()
    engine.close(restore=False)
    assert ema.num_updates == 3
    return shown


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("pp 2", "1x1x1", "tied gpt"),
        pytest.param("pp 2 x tp 2", "pp 2", "llama", marks=pytest.mark.long),
    ],
)
def test_averages_of_parts_are_those_of_torch_and_load_at_other_layouts(ranks, tmp_path, before, after, name):
    shown, want = ranks(LAYOUTS[before][0], averaged, tmp_path, before, name, 3, timeout=120)[0]
    assert shown.keys() == want.keys()
    assert [key for key in want if not torch.equal(shown[key], want[key])] == []
    loaded = ranks(LAYOUTS[after][0], load, tmp_path, after, name, 1, timeout=120)[0]
    assert loaded.keys() == want.keys()
    assert [key for key in want if not torch.equal(loaded[key], want[key])] == []
