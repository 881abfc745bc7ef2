"""Gradients inside engine.unsharded(): refused, with the calls that read and set whole ones."""

import pytest
import torch

from tests.distributed.models import Layered
from tests.distributed.training import SOME_STAGES, full_gradients, square_loss, start
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
