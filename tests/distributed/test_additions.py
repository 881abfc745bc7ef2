"""Layers and parameters that are added to a sharded model are refused before a step or a save."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from tests.distributed.training import differences, finish, numbers, square_loss, start, step
from tests.ranks import on_ranks


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 1))


def replace_layer(model):
    model[1] = nn.Linear(7, 1)


def add_layer(model):
    model[0].new = nn.Linear(7, 7)


def append_block(model):
    model.append(nn.Sequential(nn.Linear(1, 1)))


def add_parameter(model):
    model[0].scale = nn.Parameter(torch.ones(7))


REFUSED = {
    replace_layer: "1.weight",
    add_layer: "0.new.weight",
    append_block: "2.0.weight",
    add_parameter: "0.scale",
}


@on_ranks(1)
def test_what_is_added_to_a_sharded_model_is_refused_and_to_a_closed_one_is_not():
    found = []
    for add, name in REFUSED.items():
        engine, optimizer = start(build(), "SGD")
        add(engine.module)
        engine.backward(engine(numbers(0, 5, 7)).square().mean())
        for call in (engine.step, optimizer.step, engine.full_state_dict, engine.unsharded().__enter__):
            with pytest.raises(RuntimeError) as error:
                call()
            if f"'{name}' was added to a sharded model" not in str(error.value):
                found.append(str(error.value))
    model = build()
    replica = copy.deepcopy(model)
    engine, optimizer = start(model, "SGD")
    model[0].append(nn.Dropout(0.0))  # nothing to shard
    model.same = model[1]
    del model.same
    engine.close()
    model[0].new = nn.Linear(7, 1)
    del model[0].new
    engine, optimizer = start(model, "SGD")
    got = finish(engine, [step(engine, optimizer, lambda m, n: m(numbers(0, 5, 7)).square().mean(), 0)])
    made = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    want = finish(replica, [step(replica, made, square_loss, 0)])
    assert not (found + differences("stage 3", got, want))


@on_ranks(1)
def test_a_shown_parameter_in_another_module_and_a_copy_are_additions_too():
    refused = partial(pytest.raises, RuntimeError, match=r"'twin' was added to a sharded model")
    for is_copy in (True, False):
        engine, optimizer = start(build(), "SGD", stage=3)
        model = engine.module
        with refused() if is_copy else nullcontext(), engine.unsharded():
            twin = copy.deepcopy(model[1].weight) if is_copy else model[1].weight
            if is_copy:
                model.register_parameter("twin", twin)
        if not is_copy:
            model.register_parameter("twin", twin)
        for call in (engine.full_state_dict, optimizer.step):
            with refused():
                call()


@on_ranks(2)
def test_a_parameter_that_the_optimizer_gets_after_sharding_is_refused_at_the_step():
    engine, optimizer = start(build())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]})
    engine(torch.ones(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"group 1 .* shape \[3, 4\], added after the model"):
        optimizer.step()


@on_ranks(2)
def test_parameters_that_are_tied_under_unsharded_are_refused_by_name():
    messages = []
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    engine, _ = start(model, "SGD")
    before = {name: value.clone() for name, value in engine.full_state_dict().items()}
    with pytest.raises(RuntimeError) as error, engine.unsharded(write_back=True):
        model[2].weight = model[0].weight
    messages.append(str(error.value))
    after = engine.full_state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert all("'2.weight' was replaced, tied or removed" in message for message in messages)
