"""Gradients that need no exchange are handed on as they are, with the bits of plain PyTorch.

The programs here leave the ordinary way between two micro-batches. The reference takes the same way with the
same model without an engine. The sums are those of the same additions in the same order, so they are compared
to the bit.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn

import zeroshard
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.training import running_batch
from zeroshard.parameters.sharded import gradient_of


class Net(nn.Module):
    """Its forward shows a value beside its output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)
        self.shown = None

    def forward(self, x):
        self.shown = torch.tanh(self.first(x))
        return self.second(self.shown)


class Program:
    """The calls of a program, for an engine and for a plain model."""

    def __init__(self, model, engine=None):
        self.model, self.call, self.engine = model, engine or model, engine
        self.generator = torch.Generator().manual_seed(1)

    def loss(self):
        return self.call(torch.randn(5, 4, generator=self.generator)).square().mean()

    def clear(self):
        (self.engine or self.model).zero_grad()


def none_for_one(program):
    program.loss().backward()
    next(program.model.parameters()).grad = None
    program.loss().backward()


def edited_between(program):
    program.loss().backward()
    next(program.model.parameters()).grad.mul_(0.5)
    program.loss().backward()


def shown_value_alone(program):
    program.loss().backward()
    program.loss()
    program.model.shown.sum().backward()  # the root's output has no gradient in this backward
    program.loss().backward()


def shown_value_too(program):
    for _ in range(2):
        loss = program.loss()
        (program.model.shown.square().sum() + loss).backward()


def with_a_graph(program):
    program.loss().backward()
    program.loss().backward(create_graph=True)
    program.loss().backward()


def asked_for_alone(program):
    program.loss().backward()
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(program.call(x).sum(), x)
    program.loss().backward()


PROGRAMS = [
    none_for_one,
    edited_between,
    shown_value_alone,
    shown_value_too,
    with_a_graph,
    asked_for_alone,
]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(1)
def test_one_rank_has_the_gradients_of_plain_torch(program, stage):
    plain = Net()
    model = deepcopy(plain)
    config = {"stage": stage, "units": lambda module: isinstance(module, nn.Linear)}
    engine = zeroshard.initialize(model, None, config).engine
    program(Program(plain))
    program(Program(model, engine))
    want = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found = {name: gradient_of(parameter) for name, parameter in engine.named_parameters()}
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name], gradient.flatten()), name
    buffers = engine._runtime.buffers
    assert all(parameter.grad is None for buffer in buffers for parameter in buffer.unsharded)


@on_ranks(1)
def test_a_gradient_without_exchange_is_not_copied():
    made = []
    model = Net()
    engine = zeroshard.initialize(model, None, {"stage": 0}).engine
    model.second.weight.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    engine(torch.ones(2, 4)).sum().backward()
    assert made == [gradient_of(engine.get_parameter("second.weight")).data_ptr()]


def run_part_of_a_batch(engine):
    with running_batch(engine._runtime):
        engine.backward(engine(torch.ones(2, 4)).sum())
        raise LookupError


@on_ranks(1, 2)
def test_a_batch_that_has_failed_takes_no_step_until_zero_grad():
    engine = zeroshard.initialize(Net(), torch.optim.AdamW, {"stage": 3}).engine
    with pytest.raises(LookupError):
        run_part_of_a_batch(engine)
    with pytest.raises(RuntimeError, match="only a part of a micro-batch; call zero_grad"):
        engine.step()
    engine.zero_grad()
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert engine.step()


class Mixed(nn.Module):
    """A frozen layer in float16 before a trained one in float32."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.base(x.half()).float())


def leave_out_the_scale():
    engine = zeroshard.initialize(Mixed(), None, {"stage": 0}).engine
    with pytest.raises(RuntimeError, match="a loss without loss scale"):
        engine(torch.ones(2, 4)).sum().backward()
    engine.zero_grad()
    engine.backward(engine(torch.ones(2, 4)).sum())
    return gradient_of(engine.module.head.bias).tolist()


def test_a_loss_without_its_scale_is_refused_at_one_rank_as_at_two(ranks):
    assert ranks(1, leave_out_the_scale) == [[2.0, 2.0, 2.0]]
    assert ranks(2, leave_out_the_scale) == [[2.0, 2.0, 2.0]] * 2
