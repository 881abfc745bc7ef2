"""Clipping with far main parameters: squares are noted before gradients leave, parts are scaled in turn."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from tests.checkpoint import runs
from tests.ranks import on_ranks
from tests.stores.tiers import BF16_MAIN, FILES, num_notes, offload
from zeroshard.parameters.sharded import gradient_of
from zeroshard.stepping.clipping import global_norm
from zeroshard.stores import store as stores_of_gradients

STREAMS = SimpleNamespace(has_streams=lambda device: True)
"""As beside an accelerator: gradients of far main parameters are copied to other memory."""


def backward(engine, number=0):
    engine.backward(runs.token_loss(engine, number))


def first_of(engine):
    return next(p for p in engine.parameters() if p.requires_grad and p.numel())


def scale_through_data(engine):
    backward(engine)
    for p in engine.parameters():
        if p.grad is not None:
            p.grad.data.mul_(3)


def replace(engine):
    backward(engine)
    for p in engine.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)


def set_whole(engine):
    backward(engine)
    name, parameter = next((n, p) for n, p in engine.named_parameters() if p.requires_grad)
    engine.set_full_gradient(name, torch.ones(parameter.full_shape))


def add_up(engine):
    backward(engine)
    engine.backward(runs.token_loss(engine, 1))


def accumulate(engine):
    engine.set_gradient_accumulation_steps(2)
    backward(engine)
    engine.step()
    backward(engine, 1)


def stop_early(engine):
    engine.set_gradient_accumulation_steps(3)
    backward(engine)
    engine.step()
    backward(engine, 1)
    engine._runtime.before_step()


def add_up_later(engine):
    with engine.no_sync():
        backward(engine)
    engine.backward(runs.token_loss(engine, 1))


def clip_twice(engine):
    backward(engine)
    engine.clip_grad_norm_(0.05)


def register_a_hook(engine):
    """A hook that does not look."""
    first_of(engine).register_post_accumulate_grad_hook(lambda parameter: None)
    backward(engine)


def clip_another_way(engine):
    backward(engine)
    engine.clip_grad_norm_(0.05, norm_type=1)


def read_before(engine):
    """Reads before the backward, which sets others."""
    assert all(p.grad is None for p in engine.parameters())
    backward(engine)


def keep_zeros(engine):
    backward(engine)
    engine.zero_grad(set_to_none=False)
    backward(engine)


def drop_one(engine):
    backward(engine)
    first_of(engine).grad = None


WAYS = {
    backward: True,
    add_up: True,
    accumulate: True,
    stop_early: None,
    add_up_later: True,
    scale_through_data: False,
    replace: False,
    set_whole: None,
    clip_twice: False,
    clip_another_way: False,
    register_a_hook: True,
    read_before: True,
    keep_zeros: False,
    drop_one: False,
}
"""By the way: True if the norm comes from notes; None if a part of it may."""


BF16 = {"precision": "bf16"}
"""Main parameters have another dtype than forwards, so they lie in files, and gradients on the host."""
CASES = [
    pytest.param(1, BF16, marks=pytest.mark.long),
    pytest.param(3, BF16, marks=pytest.mark.long),
    pytest.param(3, BF16_MAIN, id="3-bf16 main"),
]


@pytest.mark.parametrize(("stage", "precision"), CASES)
@on_ranks(2)
def test_the_norm_from_notes_is_that_of_the_gradients(tmp_path, stage, precision):
    config = offload(tmp_path, **(FILES if stage == 3 else {})) | {"stage": stage} | precision
    with mock.patch.object(stores_of_gradients, "streams", STREAMS):
        engine = runs.start({"clip_grad_norm": 1.0} | config)
        for way, is_noted in WAYS.items():
            way(engine)
            runtime = engine._runtime
            num_noted, got = num_notes(runtime), global_norm(runtime, 2.0)
            assert is_noted is None or (num_noted > 0) == is_noted, way.__name__
            for unit in runtime.units:
                for gradients in unit.gradients:
                    gradients.noted = None
            want = global_norm(runtime, 2.0)
            torch.testing.assert_close(got, want, rtol=2e-7, atol=0)  # float64 sums, rounded to float32 once
            engine.zero_grad()
            engine.set_gradient_accumulation_steps(1)
        engine.close(restore=False)


class Sparse(nn.Module):
    """Blocks of which a step uses some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, used):
        for number in used:
            x = x + self.blocks[number](x)
        return x.square().mean()


class Together(nn.Module):
    """One unit, of which a step uses some layers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, used):
        return self.inner(x, used)


def in_one_unit(config):
    """The bits of gradients, of the norm and of parameters, and whether the norm comes from notes."""
    engine = runs.start(config | {"units": ["Sparse"]}, model=Together(Sparse()))
    generator, found, noted = torch.Generator().manual_seed(torch.distributed.get_rank()), [], []
    for uses in (((0, 1), (1, 2)), ((0,), (0, 1, 2), (2,)), ((0, 1, 2), (0,)), ((1,), (1,))):
        grads = []
        for used in uses:
            engine.backward(engine(torch.randn(4, 6, generator=generator).requires_grad_(), used))
            slots = [gradient_of(p) for p in engine.parameters()]  # p.grad is a look, which voids notes
            assert all(new is old for old, new in zip(grads, slots, strict=False) if old is not None)
            grads = slots
        noted.append(num_notes(engine._runtime))
        found += [None if grad is None else grad.clone() for grad in grads]
        engine.step()
        found += [engine.grad_norm, *(p.detach().clone() for p in engine.parameters())]
    engine.close(restore=False)
    return found, noted


@pytest.mark.parametrize(("stage", "precision"), CASES)
@on_ranks(2)
def test_layers_that_some_backwards_leave_out_add_up_alike(tmp_path, stage, precision):
    config = {"stage": stage, "clip_grad_norm": 0.01} | precision
    want, _ = in_one_unit(config)
    with mock.patch.object(stores_of_gradients, "streams", STREAMS):
        got, notes = in_one_unit(config | offload(tmp_path, **(FILES if stage == 3 else {})))
    assert all(one is other or torch.equal(one, other) for one, other in zip(want, got, strict=True))
    assert all(num > 0 for num in notes)


@pytest.mark.parametrize("precision", ["fp32", "bf16", {"param_dtype": "fp16", "loss_scale": 8.0}])
@on_ranks(2)
def test_gradients_that_are_not_finite_are_found_in_the_notes(tmp_path, precision):
    config = {"stage": 3, "precision": precision, "nonfinite": "skip", **offload(tmp_path, **FILES)}
    with mock.patch.object(stores_of_gradients, "streams", STREAMS):
        engine = runs.start(config)
        for number, factor in enumerate((1.0, float("nan"), 1.0, float("inf"), 1.0)):
            tokens = runs.batch(number)
            logits = engine(tokens[:, :-1]) * (factor if torch.distributed.get_rank() == 0 else 1.0)
            engine.backward(logits.float().square().mean())
            assert num_notes(engine._runtime) > 0
            assert engine.step() is (factor == 1.0)
