"""Parameters that others put into the modules or add to the model are refused by name; kept ones raise."""

import copy
import re

import pytest
import torch
from torch import nn

from tests.distributed.models import Tiny
from tests.distributed.training import (
    differences,
    finish,
    numbers,
    refused,
    square_loss,
    start,
    step,
    train_replicated,
)
from tests.ranks import on_ranks


class OnlyFirst(nn.Module):
    def forward(self, outputs):
        return outputs[0]


def assign(model, x):
    model[1][0].weight = nn.Parameter(torch.randn(7, 7))
    model(x)


def assign_in_an_rnn(model, x):
    model[3].weight_hh_l0 = nn.Parameter(torch.randn(28, 7))
    model(x)


def delete(model, x):
    del model[1][0].bias
    model(x)


def tie(model, x):
    model[1][0].weight = model[2][0].weight
    model(x)


def call_functionally(model, x):
    torch.func.functional_call(model, {"1.0.weight": torch.randn(7, 7)}, x)


def assign_and_read(model, x, engine):
    model[1][0].weight = nn.Parameter(torch.randn(7, 7))
    engine.full_state_dict()


MESSAGE = "'{}' was replaced, tied or removed after initialize: its module now has a {}"
CASES = {
    assign: ("1.0.weight", "Parameter"),
    assign_in_an_rnn: ("3.weight_hh_l0", "Parameter"),
    delete: ("1.0.bias", "NoneType"),
    tie: ("1.0.weight", "ShardedParameter"),
    call_functionally: ("1.0.weight", "Tensor"),
    assign_and_read: ("1.0.weight", "Parameter"),
}


@on_ranks(1, 2)
def test_another_parameter_in_a_slot_is_refused_by_name_and_the_next_step_is_right():
    """Refuses each case, and trains on as if nothing had been tried."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.LSTM(7, 7), OnlyFirst(), nn.Linear(7, 1))
    want = train_replicated(copy.deepcopy(model), "SGD", len(CASES), square_loss)
    engine, optimizer = start(model, "SGD")
    losses = []
    for number, (case, words) in enumerate(CASES.items()):
        slots = [(part, dict(part._parameters)) for part in model.modules()]
        more = [engine] if case is assign_and_read else []
        with pytest.raises(RuntimeError, match=re.escape(MESSAGE.format(*words))):
            case(model, numbers(99, 5, 7), *more)
        for part, parameters in slots:
            for name, parameter in parameters.items():
                setattr(part, name, parameter)
        losses.append(step(engine, optimizer, square_loss, number))
    assert not differences("stage 3", finish(engine, losses), want)


class Penalized(Tiny):
    """Keeps a reference to a parameter beside the modules."""

    def __init__(self):
        super().__init__()
        self.kept, self.uses = [self.inner.weight], None

    def forward(self, x):
        return super().forward(x) + (self.uses(self.kept) if self.uses else 0.0)


USES = {
    "pow": lambda kept: kept[0].pow(2).sum(),
    "numel": lambda kept: kept[0].numel(),
    "data": lambda kept: kept[0].data,
    "requires_grad_": lambda kept: kept[0].requires_grad_(False),
    "foreach_norm": lambda kept: torch._foreach_norm(kept),
}


@on_ranks(1, 2)
def test_a_parameter_that_was_kept_elsewhere_raises_by_name_where_it_is_used():
    model = Penalized()
    engine, optimizer = start(model, "SGD", stage=3)
    for use in USES.values():
        for is_in_forward in (True, False):
            model.uses = use if is_in_forward else None
            with pytest.raises(RuntimeError, match=r"'inner.weight', from a reference that was kept"):
                engine(numbers(0, 5, 7)) if is_in_forward else use(model.kept)
    model.uses = None
    assert "inner.weight" in repr(model.kept)
    assert model.kept[0] in {model.kept[0]}
    assert model.kept[0].dtype is torch.float32
    step(engine, optimizer, square_loss, 0)


def two_layers():
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
        engine, optimizer = start(two_layers(), "SGD")
        add(engine.module)
        engine.backward(engine(numbers(0, 5, 7)).square().mean())
        for call in (engine.step, optimizer.step, engine.full_state_dict, engine.unsharded().__enter__):
            message = refused(call)
            found += [message] * (f"'{name}' was added to a sharded model" not in message)
    model = two_layers()
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


@on_ranks(2)
def test_a_parameter_that_the_optimizer_gets_after_sharding_is_refused_at_the_step():
    engine, optimizer = start(two_layers())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]})
    engine(torch.ones(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"group 1 .* shape \[3, 4\], added after the model"):
        optimizer.step()
