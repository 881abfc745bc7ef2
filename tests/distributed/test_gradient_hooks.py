"""Hooks that a user registers on parameters after initialize, against DDP or one process."""

import copy

import pytest
import torch

import zeroshard
from tests.distributed.models import Layered
from tests.distributed.training import (
    SOME_STAGES,
    finish,
    full_gradients,
    plain,
    replicate,
    square_loss,
    start,
)
from tests.ranks import on_ranks


class Visited(Layered):
    """Hands its table to `visit`, once, in a forward."""

    visit = None

    def forward(self, x):
        if self.visit is not None:
            visit, self.visit = self.visit, None
            visit(self.table)
        return super().forward(x)


def trained(engine):
    return [parameter for parameter in engine.parameters() if parameter.requires_grad]


# ---------------------------------------------------------------------------------- post-accumulate hooks


@on_ranks(2)
def test_optimizers_may_step_in_the_hooks():
    """An optimizer for each parameter, stepped in its hook, against one that steps after the backward."""
    found = []
    for stage in SOME_STAGES:
        want_engine, want_optimizer = start(Layered(), "SGD", stage=stage)
        engine, _, _, _ = zeroshard.initialize(Layered(), None, {"stage": stage})
        for parameter in trained(engine):
            optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)

            def step(p, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for number in range(3):
            square_loss(want_engine, number).backward()
            want_optimizer.step()
            want_optimizer.zero_grad()
            square_loss(engine, number).backward()
            if any(p.grad is not None for p in engine.parameters()):
                found.append((stage, "gradient"))
        want, got = finish(want_engine, []).parameters, finish(engine, []).parameters
        found += [(stage, name) for name in want if not torch.equal(got[name], want[name])]
    return found


# ------------------------------------------------------------------------------------------- tensor hooks


@pytest.mark.parametrize("where", ["after initialize", "forward"])
@on_ranks(2)
def test_a_tensor_hook_gets_the_whole_local_gradient_as_in_ddp(where):
    """A mask of the whole gradient: the gradients that are left differ from DDP's in these places."""
    mask = torch.ones(3, 7)
    mask[1] = 0

    def register(parameter):
        shapes = []
        parameter.register_hook(lambda gradient: shapes.append(gradient.shape) or gradient * mask)
        return shapes

    replica = replicate(Layered(), find_unused=True)
    register(plain(replica).table)
    square_loss(replica, 0).backward()
    want, found = plain(replica).table.grad.flatten(), []
    assert not want[7:14].any()
    for stage in SOME_STAGES:
        engine, _ = start(Visited(), "SGD", stage=stage)
        if where == "forward":
            engine.module.visit = lambda parameter: register(parameter)
        else:
            register(dict(engine.named_parameters())["table"])
        square_loss(engine, 0).backward()
        if not torch.equal(full_gradients(engine)["table"], want):
            found.append(stage)
    return found


@pytest.mark.parametrize("stage", SOME_STAGES)
@on_ranks(2)
def test_a_hook_on_a_parameter_that_unsharded_shows_is_a_hook_on_the_trained_one(stage):
    engine, _ = start(Layered(), "SGD", stage=stage)
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
