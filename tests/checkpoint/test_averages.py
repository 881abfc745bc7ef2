"""Moving averages in checkpoints: saved at one layout, loaded at any other, to the bit."""

import json
import warnings

import pytest
import torch

import zeroshard
from tests.checkpoint.runs import BATCH, build, start, state, train
from zeroshard.checkpoint.files import MANIFEST, find
from zeroshard.checkpoint.manifest import Manifest, parse
from zeroshard.checkpoint.tensors import open_checkpoint
from zeroshard.cli.checkpoints import describe, to_json

HYBRID = {"stage": 3, "shard_group_size": 2}
BEFORE, AFTER = range(3), range(3, 6)


def shown(engine, ema):
    """The averages as the model shows them, and the number of updates; collective."""
    with ema.applied():
        return engine.full_state_dict() | {"updates": torch.tensor(ema.num_updates)}


def save(folder, config=3, **options):
    engine = start(config)
    ema = zeroshard.EMA(engine, 0.9)
    train(engine, BEFORE)
    engine.save_checkpoint(folder, **options)
    saved = shown(engine, ema)
    train(engine, AFTER)
    end = shown(engine, ema)
    engine.close()
    return saved, end


def load(folder, configs, back=None):
    found = []
    for number, config in enumerate(configs):
        engine = start(config, model=build(seed=1))
        ema = zeroshard.EMA(engine, 0.9)
        engine.load_checkpoint(folder)
        loaded = shown(engine, ema)
        if back is not None:
            engine.save_checkpoint(f"{back}/{number}")
        train(engine, AFTER)
        found.append((loaded, shown(engine, ema)))
    return found


def differences(got, want):
    assert got.keys() == want.keys()
    return [name for name in want if not torch.equal(got[name], want[name])]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A checkpoint of 2 ranks at stage 3, the averages in it, and those after more steps."""
    folder = tmp_path_factory.mktemp("saved")
    (saved, end), _ = ranks(2, save, folder)
    return folder, saved, end


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "configs"), [(3, [0]), (4, [1, 2, HYBRID])])
def test_averages_load_at_another_number_of_ranks_and_come_back(ranks, run, tmp_path, num_ranks, configs):
    folder, saved, end = run
    assert BATCH % num_ranks == 0
    for loaded, after in ranks(num_ranks, load, folder, configs, tmp_path)[0]:
        assert not differences(loaded, saved)
        assert after["updates"] == end["updates"] == 6
        for name in after.keys() - {"average"}:  # each rank has its own, of its data
            torch.testing.assert_close(after[name], end[name], rtol=1e-3, atol=1e-4)
    for number, _ in enumerate(configs):
        [(again, _)] = ranks(2, load, tmp_path / str(number), [3])[0]
        assert not differences(again, saved)


def test_a_checkpoint_that_a_thread_writes_holds_the_averages_of_its_moment(ranks, run, tmp_path):
    _, saved, _ = run
    ranks(2, save, tmp_path, blocking=False)
    [(loaded, _)] = ranks(1, load, tmp_path, [3])[0]
    assert not differences(loaded, saved)


def alone(folder, other):
    """Loads with an average that the checkpoint lacks, or has and the engine lacks, or of another name."""
    found = []
    for name, source in (("ema", other), (None, folder), ("fast", folder)):
        engine = start(3, model=build(seed=1))
        ema = None if name is None else zeroshard.EMA(engine, 0.9, name=name)
        train(engine, range(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.load_checkpoint(source)
        found.append([str(one.message).split("'")[2:] for one in caught if "average" in str(one.message)])
        if ema is not None:
            assert not differences(shown(engine, ema) | {}, engine.full_state_dict() | updates(0))
            train(engine, [7])
            assert not differences(shown(engine, ema), engine.full_state_dict() | updates(1))
    return found


def updates(number):
    return {"updates": torch.tensor(number)}


def save_without(folder):
    engine = start(3)
    train(engine, BEFORE)
    engine.save_checkpoint(folder)


def test_an_average_that_only_one_side_has_is_told_and_begins_anew(ranks, run, tmp_path):
    folder, *_ = run
    ranks(1, save_without, tmp_path)
    lacks, unknown, renamed = ranks(1, alone, folder, tmp_path)[0]
    assert [["".join(words)] for words in lacks] == [
        [" holds no average ema: it begins anew with the loaded values"]
    ]
    assert len(unknown) == 1
    assert unknown[0][1] == "ema"
    assert len(renamed) == 2


def load_model(folder):
    engine = start(3, model=build(seed=1))
    ema = zeroshard.EMA(engine, 0.9)
    engine.load_checkpoint(folder, optimizer=False)
    return shown(engine, ema), state(engine).values["steps"]


def test_the_model_alone_comes_with_its_averages(ranks, run):
    folder, saved, _ = run
    loaded, steps = ranks(2, load_model, folder)[0]
    assert not differences(loaded, saved)
    assert steps == (0, 0)


def test_the_content_of_a_checkpoint_names_averages(run):
    stored = open_checkpoint(find(run[0], None))
    text, content = describe(stored), to_json(stored)
    assert "moving averages" in text
    assert content["averages"] == {"ema": 3}
    kinds = {name: entry["kind"] for name, entry in content["tensors"].items()}
    assert kinds["ema/tokens.weight/ema"] == kinds["ema/average/ema"] == "average"
    assert "ema/frozen.weight/ema" not in kinds
    assert kinds["optimizer/tokens.weight/exp_avg"] == "optimizer state"


def test_a_manifest_of_a_version_without_averages_is_read(run):
    content = json.loads((find(run[0], None) / MANIFEST).read_bytes())["content"]
    del content["averages"]
    assert isinstance(parse(content), Manifest)
    assert parse(content).averages == {}
