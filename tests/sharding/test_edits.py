"""Edits of parameters in a forward or backward, and steps between these: refused, or right."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.models import Stemmed
from tests.distributed.training import (
    differences,
    finish,
    numbers,
    start,
    step,
    train_replicated,
    train_sharded,
    unequal,
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


def edited_layers(edit=None, block=Block, num_blocks=2):
    torch.manual_seed(0)
    layers = [nn.Sequential(block(edit), nn.Linear(7, 7)) for _ in range(num_blocks)]
    return nn.Sequential(*layers, nn.Linear(7, 1))


def same_batch_loss(model, number):
    return model(numbers(number, 5, 7, rank=0)).square().mean()


def reads(block):
    assert block.weight.data.norm() > 0
    assert not block.weight.data.requires_grad
    block.weight.data = block.weight.data.bfloat16()  # as layers of bitsandbytes do


def moves(block):
    """Gives parameters other memory and counts no version, as a recurrent layer on a GPU does."""
    for parameter in (block.weight, block.bias):
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
            parameter.set_(parameter.clone())


EDITS = (in_place, by_data, in_new_data, by_set, unseen)
REFUSED = r"weight' was edited in a forward or backward.*register_buffer"


@on_ranks(2)
def test_an_edit_in_a_forward_is_refused_by_name_and_changes_no_value():
    x = numbers(0, 5, 7, rank=0)
    for units, edit in (*((["Sequential"], edit) for edit in EDITS), ([], in_place)):
        model, plain = edited_layers(edit), edited_layers()
        engine, _ = start(model, "SGD", stage=3, units=units, precision=BF16)
        for context in (nullcontext(), torch.no_grad()):
            with context, pytest.raises(RuntimeError, match=f"'0.0.{REFUSED}"):
                engine(x.bfloat16())
        state = engine.full_state_dict()
        assert not list(unequal("state", state, {name: plain.state_dict()[name] for name in state}))
        for part in model[:-1]:
            part[0].edit = None
        with torch.no_grad():
            torch.testing.assert_close(engine(x.bfloat16()).float(), plain(x), rtol=0, atol=0.1)


@on_ranks(1, 2)
def test_edits_that_lose_nothing_train_as_in_ddp(num_ranks):
    """Where modules compute with the main parameters themselves, and where values stay as they are."""
    unedited = train_replicated(edited_layers(), "SGD", 3, same_batch_loss)
    edited = train_replicated(edited_layers(in_place), "SGD", 3, same_batch_loss)
    for units in (["Sequential"], []):
        for edit, stage in ((in_place, 3 if num_ranks == 1 else 1), (reads, 3), (moves, 3)):
            got = train_sharded(edited_layers(edit), "SGD", 3, same_batch_loss, units=units, stage=stage)
            assert not differences(edit.__name__, got, edited if edit is in_place else unedited)


def of_a_teacher(block):
    """A clamp that changes nothing, as Gemma 3n has one in training."""
    block.weight.data.clamp_(-100, 100)


@on_ranks(2)
def test_an_edit_of_a_frozen_parameter_is_refused_even_if_it_changes_no_value():
    model = edited_layers(of_a_teacher)
    for part in model[:-1]:
        part[0].weight.requires_grad_(False)
    engine, _ = start(model, "SGD", stage=3)
    with pytest.raises(RuntimeError, match=r"'0.0.weight' was edited in a forward"):
        engine(numbers(0, 5, 7))


class InTensorHook(Block):
    def forward(self, x):
        hidden = self.inner(x)
        if self.edit is not None:
            hidden.register_hook(lambda _: self.edit(self))
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


@on_ranks(2)
def test_an_edit_in_a_backward_is_refused_by_name():
    for block in (InTensorHook, InSecondForward):
        for units in (["Sequential"], [block.__name__], []):
            engine, _ = start(edited_layers(by_data, block), "SGD", stage=3, units=units, precision=BF16)
            with pytest.raises(RuntimeError, match=REFUSED):
                engine.backward(same_batch_loss(engine, 0))


@on_ranks(1, 2)
def test_a_forward_inside_unsharded_after_an_edit_there_is_refused_by_name():
    model, x = edited_layers(num_blocks=1), numbers(0, 5, 7, rank=0)
    want = train_replicated(model, "SGD", 1, same_batch_loss)
    engine, optimizer = start(model, "SGD", stage=3)
    for edit, name in product(
        (
            lambda p: p.mul_(2.0),
            lambda p: p.data.mul_(2.0),
            lambda p: setattr(p, "data", p.data * 2),
        ),
        ("0.0.weight", "1.bias"),
    ):
        with engine.unsharded(), torch.no_grad():
            assert model(x).shape == (5, 1)
            edit(dict(model.named_parameters())[name])
            with pytest.raises(RuntimeError, match=f"after an edit of '{name}'.*write_back=True"):
                model(x)
    return differences("then", finish(engine, [step(engine, optimizer, same_batch_loss, 0)]), want)


MODIFIED = "modified by an inplace operation"


def loss(model, number=0):
    """The same batch on all ranks."""
    return model(numbers(number, 5, 7, rank=0)).float().square().mean()


def step_between(model, optimizer):
    loss(model, 1).backward()
    late = loss(model)
    optimizer.step()
    late.backward()


def step_and_forward_between(model, optimizer):
    loss(model, 1).backward()
    late = loss(model)
    optimizer.step()
    loss(model, 1).backward()
    late.backward()


def second_backward_after_a_step(model, optimizer):
    late = loss(model)
    late.backward(retain_graph=True)
    optimizer.step()
    late.backward()


def doubled(engine, _folder):
    with engine.unsharded(write_back=True), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(2)


def set_to_zero(engine, _folder):
    for name, parameter in engine.named_parameters():
        engine.set_full_parameter(name, torch.zeros(parameter.full_shape))


def loaded(engine, folder):
    engine.load_checkpoint(folder)


@on_ranks(1, 2)
def test_a_backward_of_values_before_an_edit_is_refused_as_in_plain_pytorch(tmp_path):
    for stage in (0, 2, 3):
        engine, _ = start(Stemmed(), "SGD", stage=stage, units=["Residual"])
        engine.save_checkpoint(tmp_path)
        for edit in (doubled, set_to_zero, loaded):
            late = loss(engine.module)
            edit(engine, tmp_path)
            with pytest.raises(RuntimeError, match=MODIFIED):
                late.backward()
        loss(engine.module).backward()


@on_ranks(1)
def test_an_edit_inside_of_an_autocast_context_is_seen_by_the_next_forward_there(tmp_path):
    x = numbers(0, 5, 7, rank=0)
    for edit in (doubled, set_to_zero, loaded):
        engine, _ = start(Stemmed(), "SGD", stage=3, units=["Residual"])
        engine.save_checkpoint(tmp_path)
        if edit is loaded:
            doubled(engine, tmp_path)
        with torch.autocast("cpu", torch.bfloat16):
            engine(x)
            edit(engine, tmp_path)
            found = engine(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(found, engine(x))


@on_ranks(1)
def test_values_of_another_engine_count_as_an_edit():
    engine, _ = start(Stemmed(), "SGD", stage=3, units=["Residual"])
    other, _ = start(Stemmed(), "SGD", stage=3, units=["Residual"])
    late = loss(engine.module)
    with other.unsharded():
        for name, parameter in other.module.named_parameters():
            engine.set_full_parameter(name, parameter)
    with pytest.raises(RuntimeError, match=MODIFIED):
        late.backward()


@on_ranks(1, 2)
def test_a_backward_of_values_before_a_step_is_refused_as_in_plain_pytorch():
    for way in (step_between, step_and_forward_between, second_backward_after_a_step):
        plain = Stemmed()
        with pytest.raises(RuntimeError, match=MODIFIED):
            way(plain, torch.optim.SGD(plain.parameters()))
        for stage, precision in ((0, {}), (1, {}), (2, BF16), (3, {}), (3, BF16)):
            engine, optimizer = start(Stemmed(), "SGD", stage=stage, units=["Residual"], precision=precision)
            with pytest.raises(RuntimeError, match=MODIFIED):
                way(engine.module, optimizer)
