"""Units on one rank, from which nothing is gathered or exchanged; gradients that are handed on as they are.

The programs here leave the ordinary way between two micro-batches. The reference takes the same way with the
same model without an engine. The sums are those of the same additions in the same order, so they are compared
to the bit.
"""

import itertools

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.training import numbers
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.training import adds_as_autograd, running_batch
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


def backward(call, number, **options):
    call(numbers(number, 5, 4)).square().mean().backward(**options)


def none_for_one(call, model):
    next(model.parameters()).grad = None


def edited_between(call, model):
    next(model.parameters()).grad.mul_(0.5)


def shown_value_alone(call, model):
    call(numbers(7, 5, 4))
    model.shown.sum().backward()  # the root's output has no gradient in this backward


def with_a_graph(call, model):
    backward(call, 7, create_graph=True)


def asked_for_alone(call, model):
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(call(x).sum(), x)


BETWEEN = (none_for_one, edited_between, shown_value_alone, with_a_graph, asked_for_alone)
"""Done between two backwards."""


@on_ranks(1)
def test_one_rank_has_the_gradients_of_plain_torch():
    for act, stage in itertools.product(BETWEEN, (0, 3)):
        plain, model = Net(), Net()
        config = {"stage": stage, "units": lambda module: isinstance(module, nn.Linear)}
        engine = zeroshard.initialize(model, None, config).engine
        for call, module in ((plain, plain), (engine, model)):
            backward(call, 0)
            act(call, module)
            backward(call, 1)
        want = {name: parameter.grad for name, parameter in plain.named_parameters()}
        found = {name: gradient_of(parameter) for name, parameter in engine.named_parameters()}
        assert found.keys() == want.keys()
        for name, gradient in want.items():
            assert (found[name] is None) == (gradient is None), (act, name)
            assert gradient is None or torch.equal(found[name], gradient.flatten()), (act, name)
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


@on_ranks(1)
def test_a_batch_shows_the_parameters_of_quiet_units_from_its_begin_to_its_end():
    engine = zeroshard.initialize(Net(), torch.optim.SGD, {"stage": 0, "units": ["Linear"]}).engine
    layer, runtime = engine.module.first, engine._runtime
    at_rest = layer.weight
    with running_batch(runtime):
        shown = layer.weight
        engine(numbers(0, 5, 4))
        assert layer.weight is shown is at_rest.unsharded()
    assert layer.weight is at_rest


def edit_in_a_batch(engine):
    with running_batch(engine._runtime):
        engine.backward(engine(torch.ones(2, 4)).sum())
        with torch.no_grad():
            engine.module.first.bias.add_(1)
            engine(torch.ones(2, 4))


@on_ranks(1)
def test_an_edit_in_a_batch_is_refused_at_its_end_and_no_step_is_taken_until_zero_grad():
    config = {"stage": 0, "units": ["Linear"], "precision": {"param_dtype": "bfloat16"}}
    engine = zeroshard.initialize(Net(), torch.optim.SGD, config).engine
    with pytest.raises(RuntimeError, match=r"'first\.bias' was edited in a forward"):
        edit_in_a_batch(engine)
    with pytest.raises(RuntimeError, match="only a part of a micro-batch; call zero_grad"):
        engine.step()


def without_first(call, model):
    call(numbers(7, 5, 4))
    model.shown.detach_()
    model.second(model.shown).sum().backward()  # no gradient comes to the first layer


def batch_by_autograd(engine, act=backward, *args):
    with running_batch(engine._runtime, by_autograd=True):
        backward(engine.module, 0)
        engine._runtime.state.has_sums = True
        act(engine.module, *args)


@on_ranks(1)
def test_autograd_adds_up_a_batch_and_hooks_see_the_sum_once():
    plain, model, seen, sums = Net(), Net(), [], []
    engine = zeroshard.initialize(model, torch.optim.SGD, {"stage": 3, "units": ["Linear"]}).engine
    weight = engine.get_parameter("first.weight")
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    model.second.register_forward_hook(lambda *_: sums.append(weight.unsharded().grad is not None))
    assert adds_as_autograd(engine._runtime)
    batch_by_autograd(engine, without_first, model)
    assert sums == [False, True, True]
    engine._runtime.before_step()
    backward(plain, 0)
    without_first(plain, plain)
    for name, parameter in plain.named_parameters():
        own = engine.get_parameter(name)
        assert own.unsharded().grad is None
        assert (own.grad is None) == (parameter.grad is None)
        assert own.grad is None or torch.equal(own.grad, parameter.grad.flatten()), name
    assert [gradient.tolist() for gradient in seen] == [weight.grad.tolist()]
    engine.zero_grad()
    backward(engine, 0)  # outside of a batch the engine gets each gradient again
    assert weight.unsharded().grad is None
    assert len(seen) == 2


def fail(module):
    raise LookupError


@on_ranks(1)
def test_sums_of_a_batch_that_has_failed_are_dropped_with_its_gradients():
    engine = zeroshard.initialize(Net(), torch.optim.SGD, {"stage": 0}).engine
    weight = engine.get_parameter("first.weight")
    with pytest.raises(LookupError):
        batch_by_autograd(engine, fail)
    assert not engine._runtime.state.has_sums  # a save refuses them, and other ranks may have none
    with pytest.raises(RuntimeError, match="only a part of a micro-batch; call zero_grad"):
        engine.step()
    engine.zero_grad()
    assert weight.unsharded().grad is None
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert engine.step()


CHANGES = (
    {"param_dtype": "bfloat16"},
    {"param_dtype": "float16", "loss_scale": 8},
    {"output_dtype": "bfloat16"},
)


@on_ranks(1, 2)
def test_autograd_adds_up_nothing_that_is_cast_scaled_exchanged_or_watched_by_a_hook():
    for precision in ({}, *CHANGES):
        engine = zeroshard.initialize(Net(), None, {"stage": 0, "precision": precision}).engine
        assert adds_as_autograd(engine._runtime) == (not precision and engine.dp_world_size == 1)
        hook = engine.get_parameter("first.weight").register_hook(lambda gradient: None)
        assert not adds_as_autograd(engine._runtime)
        hook.remove()
