"""Gradients asked for by parameter: `loss.backward(inputs=...)` and `torch.autograd.grad`, against DDP."""

import functools

import pytest
import torch

from tests.distributed.models import Layered
from tests.distributed.training import (
    STAGES,
    finish,
    flat_gradients,
    full_gradients,
    numbers,
    plain,
    replicate,
    square_loss,
    start,
)
from tests.ranks import on_ranks

ASKED = ("blocks.1.0.weight", "blocks.0.0.bias")


def inside(model):
    """A list that gets ASKED, in its order, as the next forward sees them."""
    seen = [None] * len(ASKED)
    for at, name in enumerate(ASKED):
        path, _, own = name.rpartition(".")

        def hook(layer, args, output, at=at, own=own):
            seen[at] = getattr(layer, own)

        plain(model).get_submodule(path).register_forward_hook(hook)
    return seen


def named(model):
    parameters = dict(plain(model).named_parameters())
    return [parameters[name] for name in ASKED]


@on_ranks(2)
def test_backward_for_some_parameters_of_a_forward_gives_them_the_gradients_of_ddp():
    """`inputs` of parameters as the forward saw them, and of a tensor that is none."""
    replica, found = replicate(Layered(num_blocks=3), find_unused=True), []
    x = numbers(0, 5, 7).requires_grad_()
    reference = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    replica(x).square().mean().backward()
    whole = flat_gradients(replica)
    want = {name: whole[name] for name in ASKED}
    reference.step()
    reference.zero_grad()
    for stage in STAGES:
        engine, optimizer = start(Layered(num_blocks=3), "SGD", stage=stage)
        seen = inside(engine)
        for times in (1, 2):
            y = numbers(0, 5, 7).requires_grad_()
            engine(y).square().mean().backward(inputs=[y, *seen])
            got = full_gradients(engine)
            if got.keys() != want.keys() or not torch.equal(x.grad, y.grad):
                found.append((stage, sorted(got)))
            found += [(stage, times, n) for n in want if not torch.equal(got[n], times * want[n])]
        engine.zero_grad()
        engine(numbers(0, 5, 7)).square().mean().backward()
        optimizer.step()
        final, wanted = finish(engine, []).parameters, plain(replica).state_dict()
        found += [(stage, name) for name in final if not torch.equal(final[name], wanted[name])]
    return found


@on_ranks(2)
def test_grad_of_the_parameters_of_a_forward_is_the_local_one():
    """torch.autograd.grad of what the forward saw: this rank's own, as without DDP; then a whole backward."""
    found, single = [], Layered(num_blocks=3)
    want = torch.autograd.grad(square_loss(single, 0), named(single))
    replica = replicate(Layered(num_blocks=3), find_unused=True)
    square_loss(replica, 0).backward()
    for stage in STAGES:
        engine, _ = start(Layered(num_blocks=3), "SGD", stage=stage)
        seen = inside(engine)
        loss = square_loss(engine, 0)
        got = torch.autograd.grad(loss, seen)
        found += [(stage, at) for at in (0, 1) if not torch.equal(got[at], want[at])]
        found += [stage] if full_gradients(engine) else []
        square_loss(engine, 0).backward()
        whole, wanted = full_gradients(engine), flat_gradients(replica)
        found += [(stage, name) for name in wanted if not torch.equal(whole[name], wanted[name])]
    return found


@on_ranks(2)
def test_sharded_parameters_as_inputs_of_autograd_are_refused_by_name_with_the_remedy():
    for stage in STAGES:
        engine, _ = start(Layered(num_blocks=3), "SGD", stage=stage)
        loss = square_loss(engine, 0)
        trained = [p for p in engine.parameters() if p.requires_grad]
        for ask in (
            functools.partial(torch.autograd.grad, loss, trained),
            functools.partial(torch.autograd.grad, loss, trained, allow_unused=True),
            functools.partial(loss.backward, inputs=trained),
            functools.partial(torch.autograd.backward, [loss], inputs=trained[0]),
        ):
            with pytest.raises(RuntimeError, match=r"'table'.*Freeze the other parameters before"):
                ask()
        loss.backward()
