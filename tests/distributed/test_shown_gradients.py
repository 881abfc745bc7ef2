"""Gradients inside engine.unsharded(), against DDP."""

import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import Layered
from tests.distributed.training import (
    STAGES,
    distances,
    finish,
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


def edit(model):
    """A gradient clamped, one that is taken away, one that is made, one that is replaced."""
    first, second = model.blocks
    first[0].weight.grad.clamp_(-1e-3, 1e-3)
    first[2].weight.grad = None
    model.idle.weight.grad = torch.ones_like(model.idle.weight)
    second[0].weight.grad = second[0].weight.grad * 2


@pytest.mark.parametrize("precision", [{}, {"main_dtype": "bf16"}])
@on_ranks(2)
def test_edits_of_shown_gradients_are_kept_with_write_back(precision):
    found = []
    replica = replicate(Layered(), find_unused=True)
    reference = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    square_loss(replica, 0).backward()
    edit(plain(replica))
    reference.step()
    for stage in STAGES:
        engine, optimizer = start(Layered(), "SGD", stage=stage, precision=precision)
        square_loss(engine, 0).backward()
        with engine.unsharded(write_back=True):
            edit(engine.module)
        optimizer.step()
        got, want = finish(engine, []).parameters, plain(replica).state_dict()
        if not precision:
            found += [(stage, name) for name in got if not torch.equal(got[name], want[name])]
        else:
            far = distances(got, {name: want[name] for name in got}) if got else {}
            found += [(stage, name, off) for name, off in far.items() if off > 1e-2]
    return found


@on_ranks(2)
def test_edits_of_shown_gradients_without_write_back_are_told():
    for stage in STAGES:
        engine, _ = start(Layered(), "SGD", stage=stage)
        square_loss(engine, 0).backward()
        before = full_gradients(engine)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with engine.unsharded():
                engine.module.blocks[0][2].bias.grad.zero_()
        after = full_gradients(engine)
        same = all(torch.equal(before[name], after[name]) for name in before)
        texts = [str(one.message) for one in caught]
        assert same
        assert len(texts) == 1
        assert "'blocks.0.2.bias'" in texts[0]
        assert "write_back=True" in texts[0]


@on_ranks(2)
def test_different_edits_of_gradients_are_an_error_on_all_ranks():
    messages = []
    for stage in STAGES:
        engine, _ = start(Layered(), "SGD", stage=stage)
        square_loss(engine, 0).backward()
        with pytest.raises(RuntimeError) as error, engine.unsharded(write_back=True):
            engine.module.blocks[0][2].bias.grad.mul_(dist.get_rank())
        messages.append(str(error.value))
    assert all("'blocks.0.2.bias'" in message and "different edits" in message for message in messages)
