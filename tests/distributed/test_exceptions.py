"""An exception in the middle, on all ranks alike, passes unchanged and leaves the engine usable."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import (
    STAGES,
    build,
    differences,
    finish,
    full_gradients,
    numbers,
    square_loss,
    start,
    step,
    token_loss,
    unequal,
)
from tests.ranks import on_ranks


class Boom(torch.autograd.Function):
    """The identity; raises what `fuse` holds, in forward or backward."""

    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        if fuse.where == "forward":
            raise fuse.error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fuse.where == "backward":
            raise ctx.fuse.error
        return gradient, None


class Fuse:
    """Before block 1 of a GPT, something that raises on demand."""

    def __init__(self, model):
        self.where, self.error = None, None
        model.blocks[1].register_forward_pre_hook(lambda module, args: (Boom.apply(args[0], self),))

    @contextlib.contextmanager
    def burns(self, where, error):
        """Whatever is raised inside must be that very error."""
        self.where, self.error = where, error
        try:
            yield
        except BaseException as caught:
            if caught is not error:
                raise
        else:
            raise AssertionError("nothing was raised")
        finally:
            self.where, self.error = None, None


def one_run(stage, where, error, at, **config):
    """Three steps, with a failure before step number `at`; -1: none."""
    model = build("tied GPT")
    fuse = Fuse(model)
    engine, optimizer = start(model, stage=stage, **config)
    losses = []
    for number in range(3):
        if number == at:
            with fuse.burns(where, error):
                token_loss(engine, 9).backward()
        losses.append(step(engine, optimizer, token_loss, number))
    assert engine.memory_report().unsharded == 0 or stage < 3
    return finish(engine, losses)


# ------------------------------------------------------------------------------ between micro-batches


@on_ranks(2)
def test_a_backward_that_failed_on_top_of_gradients_is_an_error_until_zero_grad():
    found = []
    for stage in STAGES:
        model = build("tied GPT")
        fuse = Fuse(model)
        engine, optimizer = start(model, stage=stage, gradient_accumulation_steps=2)
        engine.backward(token_loss(engine, 0))
        engine.step()
        with fuse.burns("backward", ValueError("boom")):
            engine.backward(token_loss(engine, 9))
        engine.backward(token_loss(engine, 1))
        for act in (engine.step, optimizer.step, lambda e=engine: e.clip_grad_norm_(1.0)):
            try:
                act()
                found.append((stage, "no error"))
            except RuntimeError as error:
                found += [] if "zero_grad()" in str(error) else [(stage, str(error))]
        engine.zero_grad()
        runs = []
        for again in (engine, start(build("tied GPT"), stage=stage, gradient_accumulation_steps=2)[0]):
            changed = []
            for number in range(2):
                again.backward(token_loss(again, number))
                changed.append(again.step())
            found += [] if changed == [False, True] else [(stage, changed)]
            runs.append(finish(again, []))
        found += differences(f"stage {stage}", *runs)
    return found


@on_ranks(2)
def test_a_backward_right_after_a_failed_one_gives_its_own_gradients():
    """Two forwards, the backward of the first fails, that of the second follows at once."""
    found = []
    for stage in STAGES:
        model = build("tied GPT")
        fuse = Fuse(model)
        engine, _ = start(model, "SGD", stage=stage)
        want_engine, _ = start(build("tied GPT"), "SGD", stage=stage)
        token_loss(want_engine, 1).backward()
        first, second = token_loss(engine, 0), token_loss(engine, 1)
        with fuse.burns("backward", ValueError("boom")):
            first.backward()
        second.backward()
        found += unequal(f"stage {stage}", full_gradients(engine), full_gradients(want_engine))
    return found


class Skippable(nn.Module):
    """No parameter is unused, so its reduction starts with its last gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.tanh = nn.Linear(7, 7), nn.Tanh()

    def forward(self, x, skip):
        return x if skip else x + self.tanh(self.linear(x))


class Halved(nn.Module):
    """Blocks of which each rank skips another one inside; the input of block 1 can fail in backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Skippable() for _ in range(3))

    def forward(self, x, fuse=None):
        for number, block in enumerate(self.blocks):
            x = Boom.apply(x, fuse) if fuse is not None and number == 1 else x
            x = block(x, skip=number == 1 + dist.get_rank())
        return x


def failed_in_branches(at, **config):
    torch.manual_seed(0)
    engine, optimizer = start(Halved(), "SGD", watchdog_s=10.0, **config)
    fuse, losses = Fuse.__new__(Fuse), []
    for number in range(3):
        if number == at:
            fuse.where = fuse.error = None
            loss = engine(numbers(9, 5, 7), fuse).square().mean()
            with fuse.burns("backward", ValueError("boom")):
                loss.backward()
        losses.append(step(engine, optimizer, square_loss, number))
    return finish(engine, losses)


@on_ranks(2, timeout=120)
def test_a_failure_where_ranks_took_different_branches_leaves_no_exchange_half_done():
    """When block 1's input fails, rank 1 reduces block 1 already, and rank 0, which skipped it, does not."""
    return [
        line
        for stage in STAGES
        for at in (0, 1)
        for line in differences(
            f"stage {stage}, step {at}",
            failed_in_branches(at, stage=stage),
            failed_in_branches(-1, stage=stage),
        )
    ]


def one_rank_fails(stage):
    """Rank 1's backward fails; then training goes on as if the step had not been tried."""
    want = one_run(stage, None, None, -1)
    model = build("tied GPT")
    fuse = Fuse(model)
    engine, optimizer = start(model, stage=stage, watchdog_s=10.0)
    losses, messages = [], []
    for number in range(3):
        if number == 1:
            loss = token_loss(engine, 9)
            if dist.get_rank() == 1:
                with fuse.burns("backward", ValueError("boom")):
                    loss.backward()
            else:
                try:
                    loss.backward()
                except RuntimeError as error:
                    messages.append(str(error))
            engine.zero_grad()
        losses.append(step(engine, optimizer, token_loss, number))
    return differences(f"stage {stage}", finish(engine, losses), want), messages


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_fails_on_one_rank_is_an_error_on_the_others(ranks, stage):
    others, failed = ranks(2, one_rank_fails, stage)
    assert failed == ([], [])
    assert others[0] == []
    assert "the backward of another rank has ended in an exception" in others[1][0]
