"""Saved at one layout, loaded at any other: the same bits, and the same training from there on."""

import pytest

from tests.checkpoint.runs import build, differences, start, state, train
from zeroshard.checkpoint import save as saving
from zeroshard.checkpoint import tensors
from zeroshard.checkpoint.files import find

BEFORE, AFTER = range(3), range(3, 8)
HYBRID = {"stage": 3, "shard_group_size": 2}


def undisturbed(dropout=0.0):
    """State at the stop, and state and losses at the end, of a run that is not stopped."""
    engine = start(3, model=build(dropout=dropout))
    train(engine, BEFORE)
    stop = state(engine)
    return stop, state(engine, train(engine, AFTER))


def save(folder, config=3, dropout=0.0):
    engine = start(config, model=build(dropout=dropout))
    train(engine, BEFORE)
    engine.save_checkpoint(folder)


def resume(folder, configs, back=None, dropout=0.0):
    """By config: the state that was loaded, and that after more steps; saved again to `back`."""
    found = []
    for number, config in enumerate(configs):
        engine = start(config, model=build(seed=1, dropout=dropout))
        engine.load_checkpoint(folder)
        loaded = state(engine)
        if back is not None:
            engine.save_checkpoint(f"{back}/{number}")
        found.append((loaded, state(engine, train(engine, AFTER))))
    return found


def load(folders):
    found = []
    for folder in folders:
        engine = start(3, model=build(seed=2))
        engine.load_checkpoint(folder)
        found.append(state(engine))
    return found


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A checkpoint of 2 ranks at stage 3, the state in it, and how training goes on from there."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(2, save, folder)
    (stop, end), _ = ranks(2, undisturbed)
    return folder, stop, end


@pytest.mark.long_where(num_ranks=[1, 4])
@pytest.mark.parametrize(("num_ranks", "configs"), [(1, [3]), (3, [0]), (4, [1, 2, HYBRID])])
def test_what_two_ranks_saved_goes_on_at_another_number_of_ranks_and_comes_back(
    ranks, run, tmp_path, num_ranks, configs
):
    folder, stop, end = run
    found = ranks(num_ranks, resume, folder, configs, tmp_path)[0]
    for loaded, after in found:
        assert not differences(loaded, stop)
        assert after.losses == pytest.approx(end.losses, rel=1e-5)
    for again in ranks(2, load, [tmp_path / str(number) for number in range(len(configs))])[0]:
        assert not differences(again, stop)


def test_dropout_goes_on_to_the_bit_at_the_same_layout(ranks, tmp_path):
    ranks(2, save, tmp_path, 3, 0.3)
    (stop, end), _ = ranks(2, undisturbed, 0.3)
    for loaded, after in ranks(2, resume, tmp_path, [3], None, 0.3)[0]:
        assert not differences(loaded, stop)
        assert not differences(after, end)
        assert after.losses == end.losses


def save_in_small_boxes(folder, num_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "MAX_BOX_BYTES", num_bytes)
        save(folder)


def resume_in_small_pieces(folder, num_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "MAX_BOX_BYTES", num_bytes)
        return resume(folder, [3, 1])


@pytest.mark.long
def test_tensors_of_many_boxes_are_put_together_again(ranks, run, tmp_path):
    _, stop, end = run
    ranks(2, save_in_small_boxes, tmp_path, 300)
    stored = tensors.open_checkpoint(find(tmp_path))
    assert len(stored.tensors["mix"].boxes) > 1300 * 4 // 300
    for num_ranks in (2, 3):
        for loaded, after in ranks(num_ranks, resume_in_small_pieces, tmp_path, 100)[0]:
            assert not differences(loaded, stop)
            assert num_ranks == 3 or after.losses == end.losses
