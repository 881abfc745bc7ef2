"""An exception in the middle, on all ranks alike, passes unchanged and leaves the engine usable."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.distributed.training import (
    STAGES,
    build,
    differences,
    finish,
    start,
    step,
    token_loss,
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
