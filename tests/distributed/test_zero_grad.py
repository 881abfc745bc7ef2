"""All ways to forget gradients, where some were added up on this rank only, against plain PyTorch."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.distributed.models import Layered
from tests.distributed.training import (
    SOME_STAGES,
    distances,
    flat_gradients,
    full_gradients,
    plain,
    replicate,
    square_loss,
    start,
)
from tests.ranks import on_ranks

WAYS = {
    "the model": lambda model: model.zero_grad(),
    "the model, to zeros": lambda model: model.zero_grad(set_to_none=False),
}


def set_none(model):
    for parameter in model.parameters():
        parameter.grad = None


OTHER_WAYS = {
    "a unit": lambda model: model.blocks[0].zero_grad(),
    "a part of a unit, to zeros": lambda model: model.blocks[0][2].zero_grad(set_to_none=False),
    "p.grad = None": set_none,
    "another optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
}


def two_backwards(model, forget):
    """One that sends nothing, and one that does."""
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        (100 * square_loss(model, 0)).backward()
    forget(plain(model))
    square_loss(model, 1).backward()


@pytest.mark.parametrize(("num_ranks", "precision"), [(2, {}), (1, {"main_dtype": "bf16"})])
@on_ranks(timeout=120)
def test_gradients_that_were_forgotten_do_not_come_back(precision):
    """1e-6: the sum of two micro-batches is divided by the number of ranks; DDP divides before.

    Where gradients are not those of DDP.
    """
    found = []
    for name, forget in WAYS.items():
        replica = replicate(Layered(), find_unused=True)
        two_backwards(replica, forget)
        want = flat_gradients(replica)
        for stage in SOME_STAGES:
            engine, _ = start(Layered(), "SGD", stage=stage, precision=precision)
            two_backwards(engine, forget)
            far = distances(full_gradients(engine), want)
            found += [(name, stage, p, off) for p, off in far.items() if off > (2e-2 if precision else 1e-6)]
    return found


def forget_while_sums_wait():
    """The error of each other way, and the gradients that are there afterwards."""
    engine, _ = start(Layered(), "SGD", stage=1)
    with engine.no_sync():
        square_loss(engine, 0).backward()
    errors = []
    for forget in OTHER_WAYS.values():
        with pytest.raises(RuntimeError) as caught:
            forget(plain(engine))
        errors.append(str(caught.value))
    return errors


def forget_by_the_model_alone():
    """The composable layer: gradients that were dropped while sums waited, by names that they differ at."""
    want, engine = replicate(Layered(), find_unused=True), Layered()
    sharded = zeroshard.shard(engine, {"stage": 3})
    two_backwards(want, WAYS["the model"])
    with sharded.no_sync():
        (100 * square_loss(engine, 0)).backward()
    engine.zero_grad()
    square_loss(engine, 1).backward()
    found = torch.cat([p.grad.reshape(-1) for p in engine.parameters() if p.grad is not None])
    own = [p.grad.square().sum() for p in want.parameters() if p.grad is not None]
    total = found.square().sum()
    dist.all_reduce(total)
    with sharded.no_sync():
        square_loss(engine, 0).backward()
    sharded.close(restore=False)  # also with sums that wait
    return (total / sum(own)).item()


def test_a_sharded_model_without_engine_drops_sums_and_is_given_up_with_them(ranks):
    """1e-5: sums of squares in another order."""
    assert ranks(2, forget_by_the_model_alone) == [pytest.approx(1.0, rel=1e-5)] * 2


def test_other_ways_are_refused_while_sums_wait(ranks):
    for errors in ranks(2, forget_while_sums_wait):
        assert all("call zero_grad() of the engine" in error for error in errors)


def read_with_sums():
    """By stage, the ends of a read of p.grad before and while sums of a later micro-batch wait."""
    found = []
    for stage in SOME_STAGES:
        engine, _ = start(Layered(), "SGD", stage=stage)
        square_loss(engine, 0).backward()
        ends = []
        for hides in (False, True):
            with engine.no_sync() if hides else contextlib.nullcontext():
                square_loss(engine, 1).backward()
            try:
                if stage == 0:
                    torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
                ends.append([parameter.grad is None for parameter in engine.parameters()] and "read")
            except RuntimeError as error:
                ends.append(str(error))
        found.append(ends)
    return found


def test_a_gradient_that_lacks_sums_is_not_read(ranks):
    for found in ranks(2, read_with_sums):
        for before, while_waiting in found:
            assert before == "read"
            assert "lacks gradients of micro-batches that wait for a reduction" in while_waiting
    assert ranks(1, read_with_sums) == [[["read", "read"]] * len(SOME_STAGES)]
