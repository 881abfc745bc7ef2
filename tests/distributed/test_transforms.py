"""Forwards inside the transforms of torch.func and inside tracers; backwards through gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.functional as functional
import torch.distributed as dist
import torch.func
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.distributed.models import Tiny
from tests.distributed.training import STAGES, finish, numbers, square_loss, start, step

UNITS = {"units": ["Sequential"]}


def dual(model):
    with forward_ad.dual_level():
        made = forward_ad.make_dual(numbers(0, 5, 7), numbers(1, 5, 7))
        return forward_ad.unpack_dual(model(made)).tangent.clone()


TRANSFORMS = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).square().mean())(numbers(0, 5, 7)),
    "vjp": lambda model: torch.func.vjp(lambda x: model(x), numbers(0, 5, 7))[1](numbers(1, 5, 3)),
    "jvp": lambda model: torch.func.jvp(lambda x: model(x), (numbers(0, 5, 7),), (numbers(1, 5, 7),)),
    "vmap": lambda model: torch.func.vmap(lambda x: model(x))(numbers(0, 5, 7)),
    "vmap without gradients": lambda model: torch.no_grad()(torch.func.vmap(lambda x: model(x)))(
        numbers(0, 5, 7)
    ),
    "gradients of samples": lambda model: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(
        numbers(0, 5, 7)
    ),
    "jacrev": lambda model: torch.func.jacrev(lambda x: model(x))(numbers(0, 7)),
    "jacfwd": lambda model: torch.func.jacfwd(lambda x: model(x))(numbers(0, 7)),
    "hessian": lambda model: torch.func.hessian(lambda x: model(x).sum())(numbers(0, 7)),
    "functionalize": lambda model: torch.func.functionalize(lambda x: model(x))(numbers(0, 5, 7)),
    "dual tensors": dual,
    "functional.jacobian": lambda model: functional.jacobian(lambda x: model(x), numbers(0, 5, 7)),
    "functional.jacobian of a vmap": lambda model: functional.jacobian(
        lambda x: model(x), numbers(0, 5, 7), vectorize=True
    ),
    "functional.hessian": lambda model: functional.hessian(lambda x: model(x).sum(), numbers(0, 7)),
    "functional.jvp": lambda model: functional.jvp(lambda x: model(x), numbers(0, 5, 7), numbers(1, 5, 7)),
    "inference_mode": lambda model: torch.inference_mode()(lambda: model(numbers(0, 5, 7)).clone())(),
}


def shape_of(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(5, 7))


TRACERS = (
    lambda model: torch.func.linearize(lambda x: model(x), numbers(0, 5, 7)),
    lambda model: make_fx(lambda x: model(x))(numbers(0, 5, 7)),
    lambda model: torch.export.export(model, (numbers(0, 5, 7),)),
    lambda model: torch.jit.trace(model, (numbers(0, 5, 7),)),
    torch.fx.symbolic_trace,
    shape_of,
)
REFUSAL = r"a sharded model cannot be recorded by .*\. Trace the model before zeroshard\.initialize"


def make():
    torch.manual_seed(0)
    return Tiny(2)


def averaged_step(model, optimizer, loss, number):
    """A step of plain PyTorch with the mean of the ranks' gradients."""
    value = loss(model, number)
    value.backward()
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient *= 1 / dist.get_world_size()
        dist.all_reduce(gradient)
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unlike(what, got, want):
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))
    return [] if same else [f"{what} gives {got}, not {want}"]


def apart(what, got, want):
    """Where two runs differ by more than the order of sums."""
    found = unlike(f"{what}, losses", torch.tensor(got.losses), torch.tensor(want.losses))
    for name, value in got.parameters.items():
        found += unlike(f"{what}, {name}", value, want.parameters[name])
    return found


def transform_all(stage):
    """Every transform through one engine, with a step after each."""
    model, found = make(), []
    plain = copy.deepcopy(model)
    optimizer, losses, want = sgd(plain), [], []
    engine, own = start(model, sgd(model), stage=stage, **UNITS)
    for number, (name, transform) in enumerate(TRANSFORMS.items()):
        found += unlike(f"stage {stage}, {name}", transform(engine), transform(plain))
        losses.append(step(engine, own, square_loss, number))
        want.append(averaged_step(plain, optimizer, square_loss, number))
    return found + apart(f"stage {stage}", finish(engine, losses), finish(plain, want))


@pytest.mark.long_where(num_ranks=[2], stage=[0, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_transforms_give_what_plain_pytorch_gives_and_the_steps_between_them_too(ranks, num_ranks, stage):
    for found in ranks(num_ranks, transform_all, stage):
        assert found == []


def trace_all(stage):
    model = make()
    plain = copy.deepcopy(model)
    optimizer, losses, want = sgd(plain), [], []
    engine, own = start(model, sgd(model), stage=stage, **UNITS)
    for number, trace in enumerate(TRACERS):
        with pytest.raises(RuntimeError, match=REFUSAL):
            trace(engine)
        losses.append(step(engine, own, square_loss, number))
        want.append(averaged_step(plain, optimizer, square_loss, number))
    return apart(f"stage {stage}", finish(engine, losses), finish(plain, want))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tracers_are_refused_and_the_steps_between_them_are_right(ranks, num_ranks):
    for stage in STAGES:
        for found in ranks(num_ranks, trace_all, stage):
            assert found == []


class Energy(nn.Module):
    """Takes gradients of a block inside its forward, as models of forces do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x):
        x = self.blocks[0](self.inner(x))
        forces = torch.func.vmap(torch.func.grad(lambda row: self.blocks[1](row).square().sum()))(x)
        return forces * self.scale


def loss_of_samples(model, number):
    return torch.func.vmap(lambda x: model(x))(numbers(number, 5, 7)).square().mean()


def loss_of_derivatives(model, number):
    """A residual of a differential equation."""
    slopes = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(numbers(number, 5, 7))
    return slopes.square().mean() + model(numbers(number + 50, 5, 7)).square().mean()


def loss_of_directions(model, number):
    output, tangent = torch.func.jvp(
        lambda x: model(x), (numbers(number, 5, 7),), (numbers(number + 50, 5, 7),)
    )
    return (output + tangent).square().mean()


def loss_of_critic(model, number):
    """Forwards before and after the gradient penalty."""
    x = numbers(number + 50, 5, 7).requires_grad_()
    before = model(numbers(number, 5, 7)).mean()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return before + (gradient.norm(dim=1) - 1).square().mean() - model(numbers(number + 90, 5, 7)).mean()


def loss_of_two_backwards(model, number):
    x = numbers(number + 50, 5, 7).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    penalty.backward(retain_graph=True)
    return penalty


def loss_of_samples_first(model, number):
    return loss_of_samples(model, number) + square_loss(model, number + 50)


def loss_of_samples_last(model, number):
    return square_loss(model, number + 50) + loss_of_samples(model, number)


LOSSES = (loss_of_samples, loss_of_derivatives, loss_of_directions, loss_of_critic, loss_of_two_backwards)
MIXED = (loss_of_samples_first, loss_of_samples_last, loss_of_derivatives, loss_of_directions)


def train_both(build, losses, stage, **options):
    found = []
    for loss in losses:
        model = build()
        plain = copy.deepcopy(model)
        optimizer = sgd(plain)
        engine, own = start(model, sgd(model), stage=stage, **UNITS, **options)
        got = [step(engine, own, loss, number) for number in range(3)]
        want = [averaged_step(plain, optimizer, loss, number) for number in range(3)]
        found += apart(f"stage {stage}, {loss.__name__}", finish(engine, got), finish(plain, want))
    return found


@pytest.mark.long_where(num_ranks=[2], stage=[0, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_losses_made_of_transforms_train_as_in_plain_pytorch(ranks, num_ranks, stage):
    for found in ranks(num_ranks, train_both, Tiny, LOSSES, stage):
        assert found == []
    for found in ranks(num_ranks, train_both, Energy, (square_loss,), stage):
        assert found == []


@pytest.mark.long_where(num_ranks=[2], recompute=["none"])
@pytest.mark.parametrize("recompute", ["none", "unit"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_backward_goes_through_forwards_inside_and_outside_of_transforms(ranks, num_ranks, recompute):
    for stage in STAGES:
        for found in ranks(num_ranks, train_both, Tiny, MIXED, stage, recompute=recompute):
            assert found == []


def gathered_after_transforms():
    """Elements of units gathered: after a transform, a forward and a backward; and a transform and a step."""
    model = make()
    engine, own = start(model, sgd(model), stage=3, units=["Sequential"])
    now = []
    for ends in (lambda: square_loss(engine, 1).backward(), own.step, lambda: engine.full_state_dict()):
        loss_of_samples(engine, 0)
        ends()
        now.append(engine.memory_report().unsharded)
    return now


def test_what_a_transform_gathered_is_freed_by_a_backward_or_a_step(ranks):
    assert ranks(2, gathered_after_transforms) == [[0, 0, 0]] * 2
