"""Optimizers of the user: hooks, and parameters that it has or gets."""

import pytest
import torch

from tests.parallel.pipeline.asynchronous.runs import assert_same, begin, state_of, train

# ------------------------------------------------------------------------------ parameters of optimizers


def half_of(parameters):
    return torch.optim.SGD(list(parameters)[::2], lr=0.02, momentum=0.8)


def all_of(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.8)


def in_groups(schedule, adds, stage):
    engine = begin({"schedule": schedule}, half_of if adds else all_of, stage=stage)
    if adds:
        held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        others = [p for p in engine.module.parameters() if id(p) not in held]
        engine.optimizer.add_param_group({"params": others})
    losses = train(engine, [0, 1])
    state = state_of(engine)
    engine.close(restore=False)
    return losses, state


@pytest.mark.parametrize("schedule", ["pipemare", pytest.param("lwp", marks=pytest.mark.long)])
def test_parameters_that_are_added_to_the_optimizer_are_moved_too(ranks, schedule):
    want = ranks(2, in_groups, schedule, False, 0)
    for found, plain in zip(ranks(2, in_groups, schedule, True, 0), want, strict=True):
        assert found[0] == plain[0]
        assert_same(found[1], plain[1])
