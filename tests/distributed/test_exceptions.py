"""An exception in the middle, on all ranks alike, passes unchanged and leaves the engine usable."""

import contextlib
from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.models import Recomputed, Residual
from tests.distributed.training import (
    SOME_STAGES,
    STAGES,
    caught,
    differences,
    finish,
    flat_values,
    seeded,
    small_gpt,
    square_loss,
    start,
    step,
    take_steps,
    token_loss,
)
from tests.ranks import on_ranks
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.gradients import Gradients


class Boom(torch.autograd.Function):
    """The identity; its backward may raise what `fuse` holds."""

    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fuse.is_burning:
            raise ctx.fuse.error
        return gradient, None


class Fuse:
    """Before block 1 of a model, something that raises on demand."""

    def __init__(self, model):
        self.is_burning, self.error = False, ValueError("boom")
        model.blocks[1].register_forward_pre_hook(lambda module, args: (Boom.apply(args[0], self),))

    @contextlib.contextmanager
    def burns(self):
        """What is raised inside must be that very error."""
        self.is_burning = True
        with pytest.raises(ValueError, match="boom") as raised:
            yield
        self.is_burning = False
        assert raised.value is self.error


@on_ranks(2)
def test_a_backward_that_failed_on_top_of_gradients_is_an_error_until_zero_grad():
    found = []
    for stage in SOME_STAGES:
        model = small_gpt()
        fuse = Fuse(model)
        engine, optimizer = start(model, stage=stage, gradient_accumulation_steps=2)
        take_steps(engine, [0], token_loss)
        with fuse.burns():
            engine.backward(token_loss(engine, 9))
        engine.backward(token_loss(engine, 1))
        for act in (engine.step, optimizer.step, partial(engine.clip_grad_norm_, 1.0)):
            with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
                act()
        engine.zero_grad()
        runs = []
        for again in (engine, start(small_gpt(), stage=stage, gradient_accumulation_steps=2)[0]):
            changed = []
            for number in range(2):
                again.backward(token_loss(again, number))
                changed.append(again.step())
            assert changed == [False, True]
            runs.append(finish(again, []))
        found += differences(f"stage {stage}", *runs)
    return found


class Skippable(Residual):
    """No parameter is unused, so its reduction starts with its last gradient."""

    def forward(self, x, skip):
        return x if skip else super().forward(x)


class Halved(nn.Module):
    """Blocks of which each rank skips another one inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Skippable() for _ in range(3))

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x, skip=number == 1 + dist.get_rank())
        return x


def failing_steps(make, loss, *, fails, **config):
    """The run of three steps, and what ranks were told when the backward of some failed before one of them.

    Args:
        make: the model.
        loss: of a step.
        fails: the step before which it fails, and on which ranks.
        config: of the engine.
    """
    model, (at, failing) = make(), fails
    fuse = Fuse(model)
    engine, optimizer = start(model, "SGD", watchdog_s=10.0, **config)
    losses, said = [], ""
    for number in range(3):
        if number == at:
            value = loss(engine, 9)
            with fuse.burns() if dist.get_rank() in failing else nullcontext():
                said = caught(value.backward) if dist.get_rank() not in failing else value.backward() or ""
            if len(failing) == 1:  # the others have gradients
                engine.zero_grad()
        losses.append(step(engine, optimizer, loss, number))
    assert engine.memory_report().unsharded == 0 or engine.config.stage < 3
    return finish(engine, losses), said


@on_ranks(2, timeout=120)
def test_a_failure_where_ranks_took_different_branches_leaves_no_exchange_half_done():
    """When block 1's input fails, rank 1 reduces block 1 already, and rank 0, which skipped it, does not."""
    found = []
    for stage in STAGES:
        want, _ = failing_steps(Halved, square_loss, fails=(-1, ()), stage=stage)
        for at in (0, 1):
            got, _ = failing_steps(Halved, square_loss, fails=(at, (0, 1)), stage=stage)
            found += differences(f"stage {stage}, step {at}", got, want)
    return found


@on_ranks(2)
def test_a_backward_that_fails_on_one_rank_is_an_error_on_the_others():
    """Then training goes on as if the step had not been tried."""
    found = []
    for stage in SOME_STAGES:
        want, _ = failing_steps(small_gpt, token_loss, fails=(-1, ()), stage=stage)
        got, said = failing_steps(small_gpt, token_loss, fails=(1, (1,)), stage=stage)
        found += differences(f"stage {stage}", got, want)
        assert "the backward of another rank has ended in an exception" in said or dist.get_rank() == 1
    return found


@on_ranks(2)
def test_a_reduction_that_fails_in_its_later_part_is_begun_anew_by_the_next_backward():
    """Gradients that have arrived do not fit into memory, say."""
    engine, optimizer = start(small_gpt(), stage=3, num_prefetch=1)
    fresh, other = start(small_gpt(), stage=3, num_prefetch=1)
    absorb, failing = Gradients._absorb, iter([True])

    def absorbed(gradients, result):
        if next(failing, False):
            raise MemoryError("no room for reduced gradients")
        absorb(gradients, result)

    with mock.patch.object(Gradients, "_absorb", absorbed), pytest.raises(MemoryError):
        token_loss(engine, 9).backward()
    engine.zero_grad()
    for number in range(2):
        step(engine, optimizer, token_loss, number)
        step(fresh, other, token_loss, number)
    assert all(map(torch.equal, flat_values(engine), flat_values(fresh)))


@on_ranks(2)
def test_a_second_forward_that_is_interrupted_is_not_under_way_any_more():
    """torch calls no hook at the end of a forward that KeyboardInterrupt has left."""
    models = [seeded(lambda: nn.Sequential(Recomputed(nn.Linear(7, 7)), nn.Linear(7, 7))) for _ in range(2)]
    interrupts = iter([False, True])

    def interrupt(*_):
        if next(interrupts, False):
            raise KeyboardInterrupt

    models[0][0].inner.register_forward_pre_hook(interrupt)
    runs = [start(model, "SGD", stage=3, units=["Linear"]) for model in models]
    with pytest.raises(KeyboardInterrupt):
        square_loss(runs[0][0], 9).backward()
    runs[0][0].zero_grad()
    for number, (engine, optimizer) in product(range(2), runs):
        step(engine, optimizer, square_loss, number)
    for engine, _ in runs:
        with torch.no_grad():
            square_loss(engine, 0)
        assert {type(parameter) for parameter in engine.module.parameters()} == {ShardedParameter}
    assert all(map(torch.equal, *(flat_values(engine) for engine, _ in runs)))
