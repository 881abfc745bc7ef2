"""Moving averages in checkpoints: of the model alone, and those that only one side has."""

import json
import re
import warnings

import pytest
import torch

import zeroshard
from tests.checkpoint.runs import build, start, state, train
from tests.distributed.training import different
from zeroshard.checkpoint.files import MANIFEST, find
from zeroshard.checkpoint.manifest import Manifest, parse
from zeroshard.checkpoint.tensors import open_checkpoint
from zeroshard.cli.checkpoints import describe, to_json


def shown(engine, ema):
    """The averages as the model shows them, and the number of updates; collective."""
    with ema.applied():
        return engine.full_state_dict() | {"updates": torch.tensor(ema.num_updates)}


def begin(name="ema"):
    engine = start(3, model=build(seed=1))
    return engine, zeroshard.EMA(engine, 0.9, name=name)


def save(folder):
    engine, ema = begin()
    train(engine, range(2))
    engine.save_checkpoint(folder)
    start(3).save_checkpoint(folder / "without")
    return shown(engine, ema)


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A checkpoint, and the averages in it."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks(1, save, folder)[0]


def alone(folder):
    """Loads with an average that the checkpoint lacks, and with another name than the one that it has."""
    found = []
    for name, source in (("ema", folder / "without"), ("fast", folder)):
        engine, ema = begin(name)
        train(engine, [0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.load_checkpoint(source)
        found += [
            re.findall(r"'(\w+)'[,:]", str(one.message)) for one in caught if "average" in str(one.message)
        ]
        for num_updates in range(2):
            want = engine.full_state_dict() | {"updates": torch.tensor(num_updates)}
            assert not different(shown(engine, ema), want)
            train(engine, [7])
    return found


def test_an_average_that_only_one_side_has_is_told_and_begins_anew(ranks, run):
    assert ranks(1, alone, run[0])[0] == [["ema"], ["ema", "fast"]]


def load_model(folder):
    engine, ema = begin()
    engine.load_checkpoint(folder, optimizer=False)
    return shown(engine, ema), state(engine).values["steps"]


def test_the_model_alone_comes_with_its_averages(ranks, run):
    folder, saved = run
    loaded, steps = ranks(2, load_model, folder)[0]
    assert not different(loaded, saved)
    assert steps == (0, 0)


def test_the_content_of_a_checkpoint_names_averages(run):
    stored = open_checkpoint(find(run[0], None))
    text, content = describe(stored), to_json(stored)
    assert re.search(r"average +float32", text)
    assert content["averages"] == {"ema": 2}
    kinds = {name: entry["kind"] for name, entry in content["tensors"].items()}
    assert kinds["ema/tokens.weight/ema"] == kinds["ema/average/ema"] == "average"
    assert "ema/frozen.weight/ema" not in kinds
    assert kinds["optimizer/tokens.weight/exp_avg"] == "optimizer state"


def test_a_manifest_of_a_version_without_averages_is_read(run):
    content = json.loads((find(run[0], None) / MANIFEST).read_bytes())["content"]
    del content["averages"]
    assert isinstance(parse(content), Manifest)
    assert parse(content).averages == {}
