"""Ctrl-C anywhere in training, then save_checkpoint(): what is saved is never a half-made step."""

import contextlib

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.training import SOME_STAGES, finish, numbers, unequal
from tests.ranks import on_ranks


class Interrupted(torch.autograd.Function):
    """The identity; Ctrl-C in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyboardInterrupt


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 90), nn.Linear(90, 3)
        self.at = None

    def forward(self, x):
        x = self.first(x)
        if self.at == "forward":
            raise KeyboardInterrupt
        return self.second(Interrupted.apply(x) if self.at == "backward" else x)


class Steps(torch.optim.SGD):
    """Ctrl-C between two groups."""

    is_interrupted = False

    def _init_group(self, group, *lists):
        if self.is_interrupted and group is self.param_groups[1]:
            raise KeyboardInterrupt
        return super()._init_group(group, *lists)


class Schedule(torch.optim.lr_scheduler.StepLR):
    """Ctrl-C before its step."""

    def __init__(self, optimizer, step_size):
        self.is_interrupted = False  # as a part of its state, which a checkpoint holds
        super().__init__(optimizer, step_size)

    def step(self, *args):
        if self.is_interrupted:
            raise KeyboardInterrupt
        super().step(*args)


def start(stage):
    model = Net()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
    optimizer = Steps(groups, lr=0.05, momentum=0.9)
    return zeroshard.initialize(model, optimizer, {"stage": stage}, lr_scheduler=Schedule(optimizer, 2))


def train(engine, number):
    engine.backward(engine(numbers(number, 5, 7)).square().mean())
    engine.step()


def interrupted(engine, where):
    """A batch that comes to Ctrl-C."""
    engine.module.at = where
    engine.optimizer.is_interrupted = where in ("step", "closure")
    engine.lr_scheduler.is_interrupted = where == "schedule"

    def closure():
        loss = engine(numbers(9, 5, 7)).square().mean()
        loss.backward()
        return loss

    try:
        with contextlib.suppress(KeyboardInterrupt):
            if where == "closure":
                engine.optimizer.step(closure)
            else:
                train(engine, 9)
            raise AssertionError("nothing was interrupted")
    finally:
        engine.module.at = None
        engine.optimizer.is_interrupted = engine.lr_scheduler.is_interrupted = False


def saved_after(where, stage, folder):
    """What differs from a run that was not interrupted, after the checkpoint was loaded; or the error."""
    engine, *_ = start(stage)
    train(engine, 0)
    engine.save_checkpoint(folder, "before")
    interrupted(engine, where)
    message = ""
    try:
        engine.save_checkpoint(folder, "after")
    except RuntimeError as error:
        message = str(error)
        engine.load_checkpoint(folder, "before")
        engine.save_checkpoint(folder, "loaded")
    want, *_ = start(stage)
    train(want, 0)
    again, *_ = start(stage)
    again.load_checkpoint(folder, "loaded" if message else "after")
    for each in (want, again):
        train(each, 1)
    found = list(unequal(f"stage {stage}", finish(again, []).parameters, finish(want, []).parameters))
    found += [] if again.lr_scheduler.last_epoch == want.lr_scheduler.last_epoch == 2 else ["schedule"]
    return found, message


@pytest.mark.parametrize(("num_ranks", "where"), [(1, "forward"), (2, "backward")])
@on_ranks()
def test_after_ctrl_c_before_the_step_the_state_of_the_last_step_is_saved(where, tmp_path):
    for stage in SOME_STAGES:
        assert saved_after(where, stage, f"{tmp_path}/{stage}") == ([], "")


@pytest.mark.parametrize(
    ("num_ranks", "where"),
    [(1, "closure"), (1, "schedule"), (2, "step")],
)
@on_ranks()
def test_after_ctrl_c_inside_a_step_nothing_is_saved(where, tmp_path):
    for stage in SOME_STAGES:
        found, message = saved_after(where, stage, f"{tmp_path}/{stage}")
        assert found == []
        assert "a step that was interrupted" in message
        assert "Load the last checkpoint" in message
    assert not list(tmp_path.glob("*/after*"))


@on_ranks(2)
def test_after_a_whole_step_a_checkpoint_can_be_saved_again(tmp_path):
    engine, *_ = start(2)
    interrupted(engine, "step")
    engine.zero_grad()
    train(engine, 0)
    engine.save_checkpoint(tmp_path, "next")
    assert engine.global_step == 1
