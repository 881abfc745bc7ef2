"""The micro-batches of a batch on one rank: gradients stay with autograd, and parameters stay shown.

The sums are those of plain PyTorch, from the same additions in the same order, so they are equal to the bit.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.training import STAGES
from zeroshard.parameters.sharded import ShardedParameter

NUM = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.fails = nn.Linear(6, 6), nn.LayerNorm(6), False

    def forward(self, x):
        if self.fails:
            raise LookupError("a forward that fails")
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model, number):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
    return model(x).square().mean()


def shown(engine):
    """The names of parameters that modules show as they are for computing."""
    return [name for name, p in engine.module.named_parameters() if not isinstance(p, ShardedParameter)]


def start(stage):
    engine = zeroshard.initialize(Net(), torch.optim.AdamW, {"stage": stage, "units": ["Layer"]}).engine
    return engine, engine._runtime


def run(engine, runtime, numbers):
    """Run micro-batches as a pipeline does."""
    for number in numbers:
        is_bare = runtime.is_bare
        loss = loss_of(engine.module, number)
        runtime.show_all()
        delivering = runtime.delivering() if is_bare else nullcontext()
        with runtime.reducer.next_backward(number < NUM - 1), delivering:
            loss.backward()
        yield number


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradients_of_a_batch_are_those_of_plain_pytorch(stage):
    plain = Net()
    for number in range(NUM):
        loss_of(plain, number).backward()
    engine, runtime = start(stage)
    with runtime.batch():
        list(run(engine, runtime, range(NUM)))
    for (name, ours), theirs in zip(engine.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad.flatten()), name


def test_only_the_first_forward_of_a_batch_and_those_of_users_are_noted(monkeypatch):
    engine, runtime = start(3)
    begun = []
    begin = runtime.before_forward

    def note(unit, frame):
        begun.append(unit)
        begin(unit, frame)

    monkeypatch.setattr(runtime, "before_forward", note)
    with runtime.batch():
        assert [len(begun) for _ in run(engine, runtime, range(NUM))] == [1] * NUM
    engine.backward(loss_of(engine, NUM))
    assert len(begun) == 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_after_a_batch_adds_to_its_gradients(stage):
    plain = Net()
    engine, runtime = start(stage)
    for number in range(NUM + 1):
        loss_of(plain, number).backward()
    with runtime.batch():
        list(run(engine, runtime, range(NUM)))
    engine.backward(loss_of(engine, NUM))
    for ours, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad.flatten())


def test_gradients_in_another_dtype_arrive_in_bare_micro_batches():
    config = {"stage": 0, "units": ["Layer"], "precision": "bf16"}

    def gradients(in_batch):
        engine = zeroshard.initialize(Net(), torch.optim.AdamW, config).engine
        runtime = engine._runtime
        if in_batch:
            with runtime.batch():
                list(run(engine, runtime, range(NUM)))
                assert runtime.is_bare
        else:
            for number in range(NUM):
                with runtime.reducer.next_backward(number < NUM - 1):
                    loss_of(engine.module, number).backward()
        return [p.grad for p in engine.parameters()]

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("before", [0, 2])
def test_hooks_of_gradients_are_called_for_used_parameters_alone(before):
    engine, runtime = start(3)
    for number in range(before):  # then autograd adds to sums that exist
        engine.backward(loss_of(engine, number))
    called = []
    for name, parameter in engine.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
    engine.module.layers[1] = nn.Identity()
    with runtime.batch():
        for _ in run(engine, runtime, range(NUM)):
            used = [name for name, _ in engine.named_parameters() if not name.startswith("layers.1.")]
    assert sorted(called) == sorted(used)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_shown_from_the_first_forward_to_the_end_of_the_batch(stage):
    engine, runtime = start(stage)
    with runtime.batch():
        assert not shown(engine)
        loss_of(engine.module, 0)
        assert not shown(engine)
        runtime.show_all()
        assert len(shown(engine)) == len(list(engine.parameters()))
    assert not shown(engine)


def test_a_batch_that_fails_takes_no_step_until_zero_grad_and_shows_sharded_parameters():
    engine, runtime = start(3)

    def failing():
        with runtime.batch():
            for number in run(engine, runtime, range(NUM)):
                engine.module.layers[1].fails = number == 1

    with pytest.raises(LookupError):
        failing()
    engine.module.layers[1].fails = False
    assert not shown(engine)
    with pytest.raises(RuntimeError, match="only a part of a micro-batch; call zero_grad"):
        engine.step()
    engine.zero_grad()
    plain = Net()
    loss_of(plain, 7).backward()
    engine.backward(loss_of(engine, 7))
    for ours, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad.flatten())


def test_a_backward_that_fails_in_a_batch_takes_no_step():
    def fail(gradient):
        raise LookupError("a backward that fails")

    def watch(module, args, output):
        output.register_hook(fail)

    engine, runtime = start(3)

    def failing():
        with runtime.batch():
            for number in run(engine, runtime, range(NUM)):
                if number == 1:
                    engine.module.layers[1].register_forward_hook(watch)

    with pytest.raises(LookupError):
        failing()
    with pytest.raises(RuntimeError, match="only a part of a micro-batch; call zero_grad"):
        engine.step()
    assert not shown(engine)


def test_a_parameter_outside_the_forward_of_its_unit_fails_in_the_first_micro_batch():
    class Borrower(Layer):
        def forward(self, x):
            return super().forward(x) @ self.lender[0].linear.weight

    class Borrowing(Net):
        def __init__(self):
            super().__init__()
            self.layers[2] = Borrower()
            self.layers[2].lender = [self.layers[0]]

    engine = zeroshard.initialize(Borrowing(), torch.optim.AdamW, {"stage": 0, "units": ["Layer"]}).engine
    runtime = engine._runtime
    with pytest.raises(RuntimeError, match="outside the forward of its unit"), runtime.batch():
        list(run(engine, runtime, range(NUM)))
