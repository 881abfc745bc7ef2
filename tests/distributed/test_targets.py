"""Gradients asked for by parameter: `loss.backward(inputs=...)` and `torch.autograd.grad`, against DDP."""

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


@pytest.mark.parametrize("way", ["sharded", "one by one", "inside"])
@on_ranks(2)
def test_backward_for_some_parameters_gives_them_the_gradients_of_ddp(way):
    replica, found = replicate(Layered(num_blocks=3), find_unused=True), []
    reference = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    square_loss(replica, 0).backward()
    whole = flat_gradients(replica)
    want = {name: whole[name] for name in ASKED}
    reference.step()
    reference.zero_grad()
    for stage in STAGES:
        engine, optimizer = start(Layered(num_blocks=3), "SGD", stage=stage)
        parameters = dict(engine.named_parameters())
        seen = inside(engine) if way == "inside" else []
        for times in (1, 2):
            loss = square_loss(engine, 0)
            if way == "inside":
                loss.backward(inputs=seen)
            elif way == "one by one":
                torch.autograd.backward(loss, inputs=parameters[ASKED[0]], retain_graph=True)
                torch.autograd.backward([loss], inputs=(parameters[ASKED[1]],))
            else:
                loss.backward(inputs=[parameters[name] for name in ASKED])
            got = full_gradients(engine)
            if got.keys() != want.keys():
                found.append((stage, sorted(got)))
            found += [(stage, times, n) for n in want if not torch.equal(got[n], times * want[n])]
        engine.zero_grad()
        square_loss(engine, 0).backward()
        optimizer.step()
        final, wanted = finish(engine, []).parameters, plain(replica).state_dict()
        found += [(stage, name) for name in final if not torch.equal(final[name], wanted[name])]
    return found


@on_ranks(2)
def test_backward_for_a_parameter_and_an_input():
    """`inputs` of a parameter and of a tensor that is none; both get their gradients."""
    found = []
    replica, x = replicate(Layered(num_blocks=3), find_unused=True), numbers(0, 5, 7).requires_grad_()
    replica(x).square().mean().backward()
    for stage in STAGES:
        engine, _ = start(Layered(num_blocks=3), "SGD", stage=stage)
        y = numbers(0, 5, 7).requires_grad_()
        engine(y).square().mean().backward(inputs=[y, dict(engine.named_parameters())[ASKED[0]]])
        same = (
            torch.equal(x.grad, y.grad),
            torch.equal(full_gradients(engine)[ASKED[0]], flat_gradients(replica)[ASKED[0]]),
        )
        found += [] if all(same) else [(stage, same)]
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


@pytest.mark.parametrize("allow_unused", [False, True])
@on_ranks(2)
def test_grad_over_sharded_parameters_is_refused_by_name_with_the_remedy(allow_unused):
    for stage in STAGES:
        engine, _ = start(Layered(num_blocks=3), "SGD", stage=stage)
        loss = square_loss(engine, 0)
        trained = [p for p in engine.parameters() if p.requires_grad]
        with pytest.raises(RuntimeError) as error:
            torch.autograd.grad(loss, trained, allow_unused=allow_unused)
        message = str(error.value)
        assert "'table'" in message
        assert "loss.backward(inputs=" in message
        loss.backward()
