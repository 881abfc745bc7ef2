"""Gradients inside engine.unsharded(), against DDP."""

import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import Layered
from tests.distributed.training import (
    STAGES,
    full_gradients,
    plain,
    replicate,
    square_loss,
    start,
)
from tests.ranks import on_ranks


@on_ranks(2)
def test_full_gradients_are_shown_with_full_parameters():
    found = []
    replica = replicate(Layered(), find_unused=True)
    square_loss(replica, 0).backward()
    want = {name: p.grad for name, p in plain(replica).named_parameters()}
    for stage in STAGES:
        engine, _ = start(Layered(), "SGD", stage=stage)
        with engine.unsharded():
            found += [(stage, "before", n) for n, p in engine.module.named_parameters() if p.grad is not None]
        square_loss(engine, 0).backward()
        before = full_gradients(engine)
        with warnings.catch_warnings(), engine.unsharded():
            warnings.simplefilter("error")
            for name, p in engine.module.named_parameters():
                if (p.grad is None) != (want[name] is None):
                    found.append((stage, name, p.grad))
                elif p.grad is not None and not torch.equal(p.grad, want[name]):
                    found.append((stage, name, "differs"))
            norm = torch.nn.utils.get_total_norm([p.grad for p in engine.parameters() if p.grad is not None])
        with engine.unsharded(engine.module.blocks[1]):
            shape = engine.module.blocks[1][0].weight.grad.shape
        own = engine.module.blocks[1][0].weight.grad
        after = full_gradients(engine)
        found += [] if shape == (90, 7) and own.dim() == 1 else [(stage, shape, own.shape)]
        found += [(stage, "after", n) for n in before if not torch.equal(before[n], after[n])]
        found += [] if torch.isclose(norm, engine.clip_grad_norm_(1e9)) else [(stage, norm)]
    return found


def take_away(parameter):
    parameter.grad = None


def change_shown(engine, change, write_back):
    """Change the gradient of one parameter under unsharded()."""
    with engine.unsharded(write_back=write_back):
        change(engine.module.blocks[0][2].bias)


@on_ranks(2)
def test_edits_of_shown_gradients_are_refused_with_the_remedy_and_change_nothing():
    for stage, write_back in product(STAGES, (False, True)):
        engine, _ = start(Layered(), "SGD", stage=stage)
        square_loss(engine, 0).backward()
        before = full_gradients(engine)
        for change in (lambda parameter: parameter.grad.zero_(), take_away):
            with pytest.raises(RuntimeError, match=r"'blocks.0.2.bias'.*engine\.set_full_gradient"):
                change_shown(engine, change, write_back)
        after = full_gradients(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_an_edit_of_a_gradient_on_one_rank_is_an_error_on_all_ranks_with_write_back():
    for stage in STAGES:
        engine, _ = start(Layered(), "SGD", stage=stage)
        square_loss(engine, 0).backward()
        before = full_gradients(engine)
        change = take_away if dist.get_rank() == 1 else id
        with pytest.raises(RuntimeError, match=r"'blocks.0.2.bias'.*Nothing was written \(rank 1\)"):
            change_shown(engine, change, write_back=True)
        after = full_gradients(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
