"""Gradients inside engine.unsharded(), and those that are asked for by parameter."""

from functools import partial

import pytest
import torch

from tests.distributed.models import Layered
from tests.distributed.training import (
    SOME_STAGES,
    flat_gradients,
    full_gradients,
    numbers,
    replicate,
    square_loss,
    start,
    unequal,
)
from tests.ranks import on_ranks


def take_away(parameter):
    parameter.grad = None


@on_ranks(2)
def test_gradients_are_neither_shown_nor_changed_under_unsharded_and_the_remedy_is_named():
    for stage in SOME_STAGES:
        engine, _ = start(Layered(), "SGD", stage=stage)
        square_loss(engine, 0).backward()
        before = full_gradients(engine)
        for write_back in (False, True):
            for use in (lambda parameter: parameter.grad.zero_(), take_away):
                with engine.unsharded(write_back=write_back):
                    parameter = engine.module.blocks[0][2].bias
                    with pytest.raises(RuntimeError, match=r"'blocks.0.2.bias'.*engine\.full_gradient"):
                        use(parameter)
        after = full_gradients(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_backward_for_some_parameters_of_a_forward_gives_them_the_gradients_of_ddp():
    """`inputs` of parameters as the forward saw them, and of a tensor that is none; then a whole backward."""
    x = numbers(0, 5, 7).requires_grad_()
    replica = replicate(Layered(num_blocks=3), find_unused=True)
    replica(x).square().mean().backward()
    want, found = flat_gradients(replica), []
    for stage in SOME_STAGES:
        engine, _ = start(Layered(num_blocks=3), "SGD", stage=stage)
        seen = []
        handle = engine.module.blocks[1][0].register_forward_hook(
            lambda layer, *_, to=seen: to.append(layer.weight)
        )
        for times in (1, 2):
            y = numbers(0, 5, 7).requires_grad_()
            seen.clear()
            engine(y).square().mean().backward(inputs=[y, *seen])
            got = full_gradients(engine)
            assert list(got) == ["blocks.1.0.weight"]
            assert torch.equal(x.grad, y.grad)
            found += unequal(f"{times}", got, {name: times * want[name] for name in got})
        handle.remove()
        engine.zero_grad()
        square_loss(engine, 0).backward()
        found += unequal("whole", full_gradients(engine), want)
        loss = square_loss(engine, 0)
        trained = [p for p in engine.parameters() if p.requires_grad]
        for ask in (
            partial(torch.autograd.grad, loss, trained, allow_unused=True),
            partial(loss.backward, inputs=trained),
        ):
            with pytest.raises(RuntimeError, match=r"'table'.*Freeze the other parameters before"):
                ask()
    return found
