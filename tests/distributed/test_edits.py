"""A parameter that a forward or backward edits is refused by name; reads and other memory are right."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.training import (
    SOME_STAGES,
    caught,
    differences,
    finish,
    numbers,
    same_as_replicated,
    start,
    step,
    train_replicated,
    train_sharded,
)
from tests.ranks import on_ranks


class Block(nn.Module):
    """Has a weight of its own and an inner layer; `edit` is called with it in each forward."""

    def __init__(self, edit=None):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 7)), nn.Parameter(torch.randn(7))
        self.inner, self.edit = nn.Linear(7, 7), edit

    def forward(self, x):
        if self.edit is not None:
            self.edit(self)
        return (self.inner(x) @ self.weight + self.bias).tanh()


def in_place(block):
    with torch.no_grad():
        block.weight.div_(block.weight.norm())


def by_data(block):
    block.weight.data.clamp_(-0.1, 0.1)


def in_new_data(block):
    block.weight.data = block.weight.data / 2


def by_set(block):
    with torch.no_grad():
        block.weight.set_(block.weight / 2)


def unseen(block):
    """Gives the parameter other values in other memory, and counts no version."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(block.weight):
        block.weight.set_(block.weight / 2)


BF16 = {"param_dtype": "bfloat16"}
"""Modules compute with copies at every stage."""

EDITS = (in_place, by_data, in_new_data, by_set, unseen)


def build(edit=None, block=Block, num_blocks=2):
    torch.manual_seed(0)
    layers = [nn.Sequential(block(edit), nn.Linear(7, 7)) for _ in range(num_blocks)]
    return nn.Sequential(*layers, nn.Linear(7, 1))


def same_batch_loss(model, number):
    return model(numbers(number, 5, 7, rank=0)).square().mean()


def edited(stage, edit, units):
    """The errors of two forwards, and the values after them, which are those of before."""
    model = build(edit)
    want = copy.deepcopy(model.state_dict())
    engine, _ = start(model, "SGD", stage=stage, units=units, precision=BF16)
    x = numbers(0, 5, 7, rank=0)
    messages = [caught(engine, x.bfloat16())]
    with torch.no_grad():
        messages.append(caught(engine, x.bfloat16()))
    state = engine.full_state_dict()
    messages += [name for name, value in state.items() if not torch.equal(value, want[name])]
    for part in model:
        if isinstance(part, nn.Sequential):
            part[0].edit = None
    plain = build()
    plain.load_state_dict(want)
    with torch.no_grad():
        is_same = torch.allclose(engine(x.bfloat16()).float(), plain(x), atol=0.1)
    return [*messages, *([] if is_same else ["the output is another one"])]


def of_a_teacher(block):
    """A clamp that changes nothing, as Gemma 3n has one in training."""
    block.teacher.data.clamp_(-100, 100)


class Teaching(Block):
    def __init__(self, edit):
        super().__init__(edit)
        self.teacher = nn.Parameter(torch.ones(3), requires_grad=False)


@on_ranks(2)
def test_an_edit_of_a_frozen_parameter_is_refused_even_if_it_changes_no_value():
    engine, _ = start(build(of_a_teacher, Teaching), "SGD", stage=3)
    message = caught(engine, numbers(0, 5, 7))
    assert "'0.0.teacher' was edited in a forward" in message


@on_ranks(1, 2)
def test_an_edit_of_main_parameters_with_which_modules_compute_is_as_in_ddp():
    """Where modules compute with the main parameters themselves, nothing is lost."""
    for units in (["Sequential"], []):
        stages = SOME_STAGES if torch.distributed.get_world_size() == 1 else [1]
        assert not same_as_replicated(build(in_place), "SGD", 3, same_batch_loss, units=units, stages=stages)


@on_ranks(2)
def test_an_edit_in_a_forward_is_refused_by_name_and_changes_no_value():
    for units in (["Sequential"], []):
        cases = [(edit, stage) for edit in EDITS for stage in SOME_STAGES]
        found = [(edit.__name__, stage, edited(stage, edit, units)) for edit, stage in cases]
        for edit, stage, (one, other, *more) in found:
            assert one == other
            assert "'0.0.weight' was edited in a forward or backward" in one, (edit, stage)
            assert "register_buffer" in one
            assert not more, (edit, stage)


class InTensorHook(Block):
    def __init__(self, edit):
        super().__init__()
        self.in_hook = edit

    def forward(self, x):
        hidden = self.inner(x)
        hidden.register_hook(lambda _: self.in_hook(self))
        return (hidden @ self.weight).tanh()


class InSecondForward(Block):
    """Edited when a checkpoint runs a part of the forward again, and not before."""

    num_calls = 0

    def part(self, x):
        self.num_calls += 1
        if self.num_calls == 2:
            self.edit(self)
        return self.inner(x) @ self.weight

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False).tanh()


@pytest.mark.parametrize("block", [InTensorHook, InSecondForward])
@on_ranks(2)
def test_an_edit_in_a_backward_is_refused_by_name(block):
    for stage, units in itertools.product(SOME_STAGES, (["Sequential"], [block.__name__], [])):
        engine, _ = start(build(by_data, block), "SGD", stage=stage, units=units, precision=BF16)
        message = caught(engine.backward, same_batch_loss(engine, 0))
        assert "weight' was edited in a forward or backward" in message


@on_ranks(2)
def test_an_edit_of_an_object_that_a_forward_has_left_is_refused_before_values_are_read():
    """The only edit is of an object that a forward has left; the values are to be saved."""
    stage = 1
    engine, _ = start(build(), "SGD", stage=stage, precision=BF16)
    kept = []
    engine.module[0][0].edit = lambda block: kept.append(block.bias)
    engine.backward(same_batch_loss(engine, 0))
    engine.step()
    with torch.no_grad():
        message = caught(lambda: (kept[0].mul_(2), engine.full_state_dict()))
        assert "'0.0.bias' was edited" in message


def reads(block):
    assert block.weight.data.norm() > 0
    assert not block.weight.data.requires_grad
    block.weight.data = block.weight.data.bfloat16()  # as layers of bitsandbytes do


def moves_unseen(block):
    """Gives parameters other memory and counts no version, as a recurrent layer on a GPU does."""
    for parameter in (block.weight, block.bias):
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
            parameter.set_(parameter.clone())


@pytest.mark.parametrize("act", [reads, moves_unseen])
@on_ranks(2)
def test_a_parameter_whose_values_stay_trains_as_before(act):
    for units in (["Sequential"], []):
        want = train_replicated(build(), "SGD", 3, same_batch_loss)
        found = []
        for stage in SOME_STAGES:
            got = train_sharded(build(act), "SGD", 3, same_batch_loss, stage=stage, units=units)
            found += differences(f"stage {stage}", got, want)
        assert not found


@on_ranks(1, 2)
def test_a_forward_inside_unsharded_after_an_edit_there_is_refused_by_name():
    for stage in SOME_STAGES:
        model = build(num_blocks=1)
        replica = copy.deepcopy(model)
        engine, optimizer = start(model, "SGD", stage=stage)
        messages, x = [], numbers(0, 5, 7, rank=0)
        for edit in (
            lambda p: p.mul_(2.0),
            lambda p: p.data.mul_(2.0),
            lambda p: setattr(p, "data", p.data * 2),
        ):
            for name in ("0.0.weight", "1.bias"):
                with engine.unsharded(), torch.no_grad():
                    assert model(x).shape == (5, 1)
                    edit(dict(model.named_parameters())[name])
                    with pytest.raises(RuntimeError) as error:
                        model(x)
                    messages.append(str(error.value))
                    assert f"after an edit of '{name}'" in messages[-1], messages
                    assert "write_back=True" in messages[-1]
        optimizer_of_replica = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
        got = finish(engine, [step(engine, optimizer, same_batch_loss, 1)])
        assert not differences(
            f"stage {stage}", got, finish(replica, [step(replica, optimizer_of_replica, same_batch_loss, 1)])
        )
