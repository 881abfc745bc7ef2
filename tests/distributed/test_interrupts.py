"""Ctrl-C anywhere in training, then save_checkpoint(): what is saved is never a half-made step."""

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.training import finish, seeded, square_loss, take_steps, unequal
from tests.ranks import on_ranks


def scheduled_engine(stage):
    model = seeded(lambda: nn.Sequential(nn.Linear(7, 90), nn.Linear(90, 3)))
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return zeroshard.initialize(model, optimizer, {"stage": stage}, lr_scheduler=schedule).engine


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted(engine, where):
    """A batch that comes to Ctrl-C."""
    first, optimizer = engine.module[0], engine.optimizer
    init_group = optimizer._init_group

    def between_groups(group, *lists):
        return interrupt() if group is optimizer.param_groups[1] else init_group(group, *lists)

    def closure():
        loss = square_loss(engine, 9)
        loss.backward()
        return loss

    def in_backward(module, args, output):
        output.register_hook(interrupt)

    with pytest.MonkeyPatch.context() as patch:
        if where in ("forward", "backward"):
            hook = interrupt if where == "forward" else in_backward
            patch.setattr(first, "_forward_hooks", first._forward_hooks | {-1: hook})
        elif where == "schedule":
            patch.setattr(engine.lr_scheduler, "step", interrupt)
        else:
            patch.setattr(optimizer, "_init_group", between_groups)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure) if where == "closure" else take_steps(engine, [9])


def saved_after(where, folder):
    """What differs from a run that was not interrupted, after the checkpoint was loaded; or the error."""
    engine, want, again = scheduled_engine(3), scheduled_engine(3), scheduled_engine(3)
    for each in (engine, want):
        take_steps(each, [0])
    engine.save_checkpoint(folder, "before")
    interrupted(engine, where)
    message = ""
    try:
        engine.save_checkpoint(folder, "after")
    except RuntimeError as error:
        message = str(error)
        engine.load_checkpoint(folder, "before")
        engine.save_checkpoint(folder, "loaded")
    again.load_checkpoint(folder, "loaded" if message else "after")
    for each in (want, again):
        take_steps(each, [1])
    assert again.lr_scheduler.last_epoch == want.lr_scheduler.last_epoch == 2
    assert not list(unequal(where, finish(again, []).parameters, finish(want, []).parameters))
    return message


@on_ranks(2)
def test_after_ctrl_c_before_the_step_the_state_of_the_last_step_is_saved(tmp_path):
    for where in ("forward", "backward"):
        assert not saved_after(where, tmp_path / where)


@on_ranks(2)
def test_after_ctrl_c_inside_a_step_nothing_is_saved(tmp_path):
    for where in ("closure", "schedule", "step"):
        message = saved_after(where, tmp_path / where)
        assert "a step that was interrupted" in message
        assert "Load the last checkpoint" in message
    assert not list(tmp_path.glob("*/after*"))
    engine = scheduled_engine(2)  # after a whole step a checkpoint can be saved again
    interrupted(engine, "step")
    engine.zero_grad()
    take_steps(engine, [0])
    engine.save_checkpoint(tmp_path, "next")
    assert engine.global_step == 1
