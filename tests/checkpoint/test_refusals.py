"""What would be lost, half saved or half loaded is refused, and the engine goes on."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, SequentialLR

from tests.checkpoint.runs import differences, refusal, refused, saved, start, state, token_loss, train
from tests.ranks import on_ranks
from zeroshard.checkpoint.save import Saver


@on_ranks(2)
def test_full_parameters_that_are_shown_are_not_taken_for_the_models_own(tmp_path):
    engine = saved(tmp_path, {"stage": 3, "checkpoint": {"keep_last": 1}}, numbers=[0], tag="good")
    before = state(engine)
    with engine.unsharded():
        for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_pretrained):
            assert "() inside engine.unsharded()" in refusal(lambda call=call: call(tmp_path))
    train(engine, [1])
    engine.load_checkpoint(tmp_path)
    return differences(state(engine), before)


@on_ranks(2)
def test_gradients_that_were_not_reduced_yet_are_not_left_out(tmp_path):
    engine = start(3)
    with engine.no_sync():
        engine.backward(token_loss(engine, 0))
    message = refusal(lambda: engine.save_checkpoint(tmp_path))
    engine.zero_grad()
    engine.save_checkpoint(tmp_path)
    assert "in an unfinished step" in message


class Remembers(SGD):
    """Keeps a state in a way that is given."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(self.remember(parameter))


REMEMBERED = {
    "state 'history' of 'mix' is a list of tensors": lambda p: {"history": [p.detach().clone()]},
    "names without '/', got 'a/b'": lambda p: {"a/b": 1.0},
    "names without '/', got 0": lambda p: {0: 1.0},
    "'some' of 'mix' has shape (3,); expected a number, a tensor without dimensions, or one value for each": (
        lambda p: {"some": torch.zeros(3)}
    ),
}


@on_ranks(1)
def test_states_that_could_not_be_told_apart_again_are_refused_by_name(tmp_path):
    for expected, remember in REMEMBERED.items():
        with pytest.warns(UserWarning, match="is not known to zeroshard"):
            engine = start(3, lambda model: Remembers(model.parameters(), lr=0.01))
        engine.optimizer.remember = remember
        train(engine, [0])
        assert expected in refusal(lambda engine=engine: engine.save_checkpoint(tmp_path), ValueError)
    assert not list(tmp_path.iterdir())
    counts = {"step": torch.full((1,), 2.0), "count": torch.tensor(3)}
    engine.optimizer.state.clear()
    engine.optimizer.remember = lambda _: {name: value.clone() for name, value in counts.items()}
    train(engine, [0])
    engine.save_checkpoint(tmp_path)
    engine.optimizer.state.clear()
    engine.load_checkpoint(tmp_path)
    for kept in engine.optimizer.state.values():
        assert all(kept[name].tolist() == value.tolist() for name, value in counts.items())


def schedule_of(num_parts):
    def build(optimizer):
        parts = [ConstantLR(optimizer, 0.5) for _ in range(num_parts)]
        return SequentialLR(optimizer, parts, milestones=list(range(2, num_parts + 1)))

    return build


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@on_ranks(1)
def test_a_schedule_of_another_number_of_parts_is_refused_before_anything_changes(tmp_path):
    saved(tmp_path, numbers=[0], lr_scheduler=schedule_of(3))
    other = start(3, seed=1, lr_scheduler=schedule_of(2))
    assert "expected LR schedules of the same number of parts, got 3 and 2" in refused(other, tmp_path)
    other.load_checkpoint(tmp_path, restore_hyperparameters=False)
    train(other, range(5))


@on_ranks(2)
def test_a_copy_that_fails_on_one_rank_at_once_or_when_the_device_comes_to_it_fails_on_all(tmp_path):
    engine, original = start(3), Saver.copied

    def fail(*_):
        raise RuntimeError("no memory")

    def fail_later(self, snapshot):
        return replace(original(self, snapshot), wait=fail)

    messages = []
    for copy in (fail, fail_later):
        with mock.patch.object(Saver, "copied", copy if dist.get_rank() == 1 else original):
            if copy is fail:
                messages.append(refusal(lambda: engine.save_checkpoint(tmp_path, blocking=False)))
            else:
                engine.save_checkpoint(tmp_path, blocking=False)
    messages.append(refusal(lambda: engine.save_checkpoint(tmp_path, blocking=False)))
    train(engine, [0])
    engine.save_checkpoint(tmp_path, blocking=False)
    engine.load_checkpoint(tmp_path)
    background = "the checkpoint that was saved in the background failed: no memory (rank 1)"
    assert messages == ["no memory (rank 1)", background]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-1.0"]


@on_ranks(2)
def test_client_state_holds_no_slices(tmp_path):
    engine = start(3)
    slice_of = next(iter(engine.parameters()))
    message = refusal(lambda: engine.save_checkpoint(tmp_path, client_state={"best": [slice_of]}), ValueError)
    assert "client_state['best'][0]: expected tensors" in message
    assert "got zeroshard.parameters.sharded.ShardedParameter" in message


class Stubborn(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        raise ValueError("I will not")


@on_ranks(1)
def test_a_module_that_refuses_its_state_is_told_to_leave_the_engine_half_loaded(tmp_path):
    engine = start(3, model=nn.Sequential(Stubborn(3, 3)))
    engine.save_checkpoint(tmp_path)
    message = refusal(lambda: engine.load_checkpoint(tmp_path))
    assert "I will not" in message
    assert "loaded only in part" in message
