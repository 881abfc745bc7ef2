"""The clip factor is applied part by part, and nobody else finds a gradient without it."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from tests.checkpoint import runs
from tests.tiers.test_clipping import flat_gradients
from tests.tiers.test_offload import OPTIMIZERS, offload
from tests.tiers.test_pieces import small_pieces
from zeroshard.stepping.parts import StepByParts


def noisy(optimizer):
    """Wraps the step; the wrapper changes gradients, as clipped ones."""
    own = optimizer.step

    def step():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(0.01)
        return own()

    optimizer.step = step


def scheduled(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)


def of_class(optimizer):
    """A step that does not go by parts."""
    optimizer.step = lambda: type(optimizer).step(optimizer)


def changed_steps(config):
    found = []
    for change in (noisy, scheduled, of_class):
        engine = runs.start({"stage": 3, "clip_grad_norm": 0.05} | config, OPTIMIZERS["SGD"])
        change(engine.optimizer)
        runs.train(engine, range(2))
        found.append(runs.state(engine).tensors)
        engine.close(restore=False)
    return found


def test_others_that_step_find_clipped_gradients(ranks, tmp_path):
    both = ranks(2, changed_steps, {}), ranks(2, changed_steps, offload(tmp_path))
    for want, got in zip(*both, strict=True):
        for one, other in zip(want, got, strict=True):
            assert [name for name in one if not torch.equal(one[name], other[name])] == []


class FailingStep:
    """The step of a part that fails the n-th time."""

    def __init__(self, number):
        self.left, self._step = number, StepByParts._step_at_once

    def __get__(self, parts, _):
        def step(*args):
            self.left -= 1
            if self.left == 0:
                raise OSError("no space")
            self._step(parts, *args)

        return step


def clipped_anyway(folder, act, number):
    """Gradients before and after a step that fails with the n-th part or piece; then the norm of the next."""
    with small_pieces() if number > 4 else contextlib.nullcontext():
        engine = runs.start({"stage": 3, "clip_grad_norm": 0.05} | offload(folder), OPTIMIZERS["fused"])
        engine.backward(runs.token_loss(engine, 0))
        before = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
        with (
            mock.patch.object(StepByParts, "_step_at_once", FailingStep(number)),
            pytest.raises(OSError, match="no space"),
        ):
            engine.step()
        if act == "retry":
            engine.step()
            return engine.grad_norm.item()
        if act == "add":
            engine.backward(runs.token_loss(engine, 1))
        after = flat_gradients(engine)
        factor = 0.05 / (engine.grad_norm + 1e-6)
        want = torch.cat(before) * factor
        if act == "add":
            engine.zero_grad()
            engine.backward(runs.token_loss(engine, 1))
            want += flat_gradients(engine)
        return (after - want).abs().max().item()


@pytest.mark.long_where(number=[6])
@pytest.mark.parametrize("number", [2, 6])
def test_a_step_that_fails_halfway_leaves_no_gradient_unclipped(ranks, tmp_path, number):
    assert ranks(2, clipped_anyway, tmp_path, "read", number) == [0, 0]
    assert ranks(2, clipped_anyway, tmp_path, "retry", number) == pytest.approx([0.05] * 2, rel=1e-4)
    assert ranks(2, clipped_anyway, tmp_path, "add", number) == pytest.approx([0, 0], abs=1e-7)


def left_for_later(folder):
    """The number of parameters that wait for the factor, at each part of a step."""
    engine = runs.start({"stage": 3, "clip_grad_norm": 0.05} | offload(folder), OPTIMIZERS["fused"])
    engine.backward(runs.token_loss(engine, 0))
    scaling, found = engine._guard.scaling, []
    whole = StepByParts._step_at_once

    def watch(parts, *args):
        found.append(sum(num > 0 for num in scaling._left.values()))
        whole(parts, *args)

    with mock.patch.object(StepByParts, "_step_at_once", watch):
        engine.step()
    return found


def test_gradients_of_a_part_are_clipped_with_the_part(ranks, tmp_path):
    [found] = ranks(1, left_for_later, tmp_path)
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found) > 1
