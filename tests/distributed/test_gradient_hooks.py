"""Hooks on parameters after initialize; gradients inside engine.unsharded(), and those asked for by name."""

import copy
from functools import partial

import pytest
import torch

import zeroshard
from tests.distributed.models import Layered
from tests.distributed.training import (
    differences,
    finish,
    flat_gradients,
    full_gradients,
    numbers,
    plain,
    replicate,
    square_loss,
    start,
    train_sharded,
    unequal,
)
from tests.ranks import on_ranks

# ---------------------------------------------------------------------------------- post-accumulate hooks


@on_ranks(2)
def test_optimizers_may_step_in_the_hooks():
    """An optimizer for each parameter, stepped in its hook, against one that steps after the backward."""
    want = train_sharded(Layered(), "SGD", 3, square_loss, stage=3)
    engine, _, _, _ = zeroshard.initialize(Layered(), None, {"stage": 3})
    for parameter in engine.parameters():
        if not parameter.requires_grad:
            continue
        optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)

        def hook(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    losses = []
    for number in range(3):
        loss = square_loss(engine, number)
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is None for p in engine.parameters())
    return differences("stepped in hooks", finish(engine, losses), want)


# ------------------------------------------------------------------------------------------- tensor hooks


@pytest.mark.parametrize("where", ["after initialize", "forward"])
@on_ranks(2)
def test_a_tensor_hook_gets_the_whole_local_gradient_as_in_ddp(where):
    """A mask of the whole gradient: the gradients that are left differ from DDP's in these places."""
    mask = torch.ones(3, 7)
    mask[1] = 0

    def register(parameter):
        parameter.register_hook(lambda gradient: gradient * mask)

    replica = replicate(Layered(), find_unused=True)
    register(plain(replica).table)
    square_loss(replica, 0).backward()
    want = plain(replica).table.grad.flatten()
    assert not want[7:14].any()
    engine, _ = start(Layered(), "SGD", stage=3)
    if where == "forward":
        engine.module.register_forward_pre_hook(lambda module, _: register(module.table))
    else:
        register(engine.get_parameter("table"))
    square_loss(engine, 0).backward()
    assert torch.equal(full_gradients(engine)["table"], want)


@on_ranks(2)
def test_a_hook_on_a_parameter_that_unsharded_shows_is_a_hook_on_the_trained_one():
    engine, _ = start(Layered(), "SGD", stage=3)
    called, ended = [], []
    with engine.unsharded():
        parameter = dict(engine.module.named_parameters())["table"]
        parameter.register_hook(lambda gradient: called.append(gradient.shape))
        parameter.register_post_accumulate_grad_hook(ended.append)
        copy.deepcopy(parameter).register_hook(print)
        shape = parameter.shape
    square_loss(engine, 0).backward()
    table = dict(engine.named_parameters())["table"]
    assert called == [shape]
    assert len(ended) == 1
    assert ended[0] is table


def take_away(parameter):
    parameter.grad = None


@on_ranks(2)
def test_gradients_are_neither_shown_nor_changed_under_unsharded_and_the_remedy_is_named():
    engine, _ = start(Layered(), "SGD")
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
    engine, _ = start(Layered(num_blocks=3), "SGD")
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
