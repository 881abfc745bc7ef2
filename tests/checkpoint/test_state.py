"""What a checkpoint holds beside parameters and states: precision, data, random numbers, client_state."""

import math
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.checkpoint.runs import differences, refusal, saved, start, state, token_loss, train
from tests.ranks import on_ranks

BEFORE, AFTER = range(3), range(3, 5)


# ---------------------------------------------------------------------------------------------- precision


def overflowing_loss(engine, number):
    """In step 1 the last rank's gradients are not finite."""
    bad = number == 1 and dist.get_rank() == dist.get_world_size() - 1
    return token_loss(engine, number) * (math.inf if bad else 1e-3)  # small: no other step overflows


@on_ranks(2)
def test_float16_goes_on_with_its_loss_scale_and_counters(tmp_path):
    precision = {"param_dtype": "fp16"}
    engine = saved(tmp_path, {"stage": 3, "precision": precision}, numbers=BEFORE, loss=overflowing_loss)
    stop = state(engine)
    end = state(engine, train(engine, AFTER))
    found = []
    engine = start({"stage": 3, "precision": precision}, seed=1)
    engine.load_checkpoint(tmp_path)
    found += differences(state(engine), stop)
    got = state(engine, train(engine, AFTER))
    found += differences(got, end)
    found += [] if got.losses == end.losses else [(got.losses, end.losses)]
    scale, steps = stop.values["loss scale"], stop.values["steps"]
    assert found == []
    assert (scale.value, scale.num_steps) == (32768.0, 1)  # halved by step 1, followed by a good one
    assert steps == (2, 1)


def as_float32(found):
    found.tensors = {
        name: value.float() if value.dtype == torch.float64 else value
        for name, value in found.tensors.items()
    }
    return found


@on_ranks(2)
def test_main_parameters_and_states_are_loaded_in_the_dtype_of_the_run(tmp_path):
    engine = saved(tmp_path / "single", numbers=BEFORE)
    want = state(engine)
    double = {"stage": 2, "precision": {"param_dtype": "float32", "main_dtype": "float64"}}
    engine = start(double, seed=1)
    engine.load_checkpoint(tmp_path / "single")
    assert {p.dtype for name, p in engine.named_parameters() if p.requires_grad} == {torch.float64}
    assert {value["exp_avg"].dtype for value in engine.optimizer.state.values()} == {torch.float64}
    found = differences(as_float32(state(engine)), want)
    engine.save_checkpoint(tmp_path / "double")
    back = start(3, seed=1)
    back.load_checkpoint(tmp_path / "double")
    assert {value["exp_avg"].dtype for value in back.optimizer.state.values()} == {torch.float32}
    found += differences(state(back), want)
    train(engine, AFTER)
    engine.save_checkpoint(tmp_path / "double")
    back.load_checkpoint(tmp_path / "double")
    return found + differences(state(back), as_float32(state(engine)))


# ------------------------------------------------------------------------------------------- accumulation


@on_ranks(2)
def test_in_the_middle_of_a_step_nothing_is_saved_and_loading_drops_it(tmp_path):
    folder = tmp_path / "new"

    def begin(seed):
        return start({"stage": 3, "gradient_accumulation_steps": 2}, seed=seed)

    engine = begin(0)
    train(engine, [0, 1, 2])
    said = refusal(lambda: engine.save_checkpoint(folder), RuntimeError)
    written = folder.exists()
    train(engine, [3])
    engine.save_checkpoint(folder)
    want = train(engine, range(4, 6))
    other = begin(1)
    train(other, [0])  # half a step, dropped by what is loaded
    other.load_checkpoint(folder)
    is_same, steps = train(other, range(4, 6)) == want, other.global_step
    assert "in an unfinished step" in said
    assert not written
    assert is_same
    assert steps == 3


# ------------------------------------------------------------------------------------------------ buffers


class Extra(nn.Linear):
    """Keeps what is neither parameter nor buffer."""

    def __init__(self, extra):
        super().__init__(7, 3)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


def local_object():
    class Local:
        pass

    return Local()


@on_ranks(2)
def test_extra_state_of_modules_is_given_back_to_them(tmp_path):

    def begin(seen, scale):
        return start(3, model=nn.Sequential(Extra(seen), nn.Sequential(Extra(scale))))

    engine = begin({"seen": [1, 2]}, torch.tensor([0.5, 2.0]))
    engine.save_checkpoint(tmp_path)
    engine = begin({"seen": []}, torch.tensor(0.0))
    engine.load_checkpoint(tmp_path)
    assert engine.module[0].extra == {"seen": [1, 2]}
    assert engine.module[1][0].extra.tolist() == [0.5, 2.0]
    engine.module[1][0].extra = local_object()
    said = refusal(lambda: engine.save_checkpoint(tmp_path, "other"), ValueError)
    assert "checkpoint['extra']['1.0._extra_state']: " in said


# --------------------------------------------------------------------------------------- data and numbers


def take(folder, num_batches, micro_batch_size, save):
    """The samples that this rank gets after it was resumed, where there is a checkpoint."""
    made = zeroshard.initialize(
        nn.Linear(3, 2),
        config={"stage": 3, "micro_batch_size": micro_batch_size},
        training_data=list(range(24)),
    )
    if not save:
        made.engine.load_checkpoint(folder)
    samples = []
    for number, batch in enumerate(made.dataloader, start=1):
        samples += batch.tolist()
        if save and number == num_batches:
            made.engine.save_checkpoint(folder)
            break
    return samples, made.dataloader.state_dict()["epoch"]


def test_every_sample_is_seen_once_by_the_stopped_and_the_resumed_run(ranks, tmp_path):
    first = ranks(2, take, tmp_path, 2, 3, True)
    rest = ranks(3, take, tmp_path, None, 2, False)
    assert sorted(sample for samples, _ in first + rest for sample in samples) == list(range(24))
    assert {epoch for _, epoch in first + rest} == {0}


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand()


def numbers_after_saving(folder):
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    engine = start(3, model=nn.Linear(3, 2))
    draw()
    engine.save_checkpoint(folder)
    return draw()


def numbers_after_loading(folder):
    engine = start(3, model=nn.Linear(3, 2))
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        engine.load_checkpoint(folder)
        found.append(draw())
    assert found[0] == found[1]
    return found[0]


def test_each_rank_goes_on_with_its_random_numbers_and_new_ranks_derive_theirs(ranks, tmp_path):
    want = ranks(2, numbers_after_saving, tmp_path)
    assert ranks(1, numbers_after_loading, tmp_path) == want[:1]
    got = ranks(4, numbers_after_loading, tmp_path)
    assert got[:2] == want
    assert len({str(drawn) for drawn in got}) == 4
    assert ranks(3, numbers_after_loading, tmp_path) == got[:3]


# ----------------------------------------------------------------------------------- the user's own values


@on_ranks(2)
def test_a_value_that_needs_code_on_one_rank_is_refused_by_its_key_on_all(tmp_path):
    """What is said where rank 1 gives what can't be loaded; and whether training goes on."""
    folder = tmp_path / "new"
    engine = start(3)
    bad = {"a": {"b": [1, {"c": local_object()}]}} if dist.get_rank() else {"a": 1}
    said = refusal(lambda: engine.save_checkpoint(folder, client_state=bad), ValueError)
    written = folder.exists()
    train(engine, BEFORE)
    engine.save_checkpoint(folder, client_state={"a": 1})
    loaded = start(3, seed=1).load_checkpoint(folder)
    not_a_dict = refusal(lambda: engine.save_checkpoint(folder, client_state=[1]), ValueError)
    assert "client_state: expected a dict, got list" in not_a_dict
    assert "client_state['a']['b'][1]['c']: expected tensors" in said
    assert "Local. Give what it is made from" in said
    assert said.endswith("(rank 1)")
    assert not written
    assert loaded == {"a": 1}


@on_ranks(2)
def test_ranks_that_save_to_different_places_are_told_of_both_and_nothing_is_written(tmp_path):
    engine, rank = start(3, model=nn.Linear(3, 2)), dist.get_rank()
    places = (tmp_path / str(rank),), (tmp_path, f"tag-{rank}"), (tmp_path, "b/d" if rank else "good")
    said = [refusal(lambda place=place: engine.save_checkpoint(*place), ValueError) for place in places]
    written = list(tmp_path.rglob("*"))
    assert f"rank(s) 0 have '{tmp_path}/0' with tag 'step-0'; rank(s) 1 have '{tmp_path}/1'" in said[0]
    assert "tag 'tag-0'; rank(s) 1 have" in said[1]
    assert "got 'b/d' (rank 1)" in said[2]
    assert written == []


@on_ranks(2)
def test_ranks_that_load_different_checkpoints_are_told_so(tmp_path):
    engine, rank = start(3, model=nn.Linear(3, 2)), dist.get_rank()
    engine.save_checkpoint(tmp_path, "one")
    engine.save_checkpoint(tmp_path, "two")
    different, missing = [
        refusal(lambda other=other: engine.load_checkpoint(tmp_path, ("one", other)[rank]), ValueError)
        for other in ("two", "none")
    ]
    assert "the ranks see different checkpoints: rank(s) 0 have one.0; rank(s) 1 have two.0" in different
    assert "expected a checkpoint with tag 'none'; the tags there are: one, two (rank 1)" in missing
