"""Clipping by the global norm, against torch.nn.utils.clip_grad_norm_ on DDP.

The norm is within 1e-6 (its sum has another order); the clipped run has the same bits at all stages. It is
taken over the runs of memory that the gradients of a buffer form, as on accelerators.
"""

import copy
import math

import pytest
import torch
from torch import nn

from tests.distributed.training import (
    ALL_STAGES,
    STAGES,
    differences,
    distance_of_all,
    finish,
    flat_gradients,
    full_gradients,
    made_by,
    replicate,
    small_gpt,
    start,
    take_steps,
    token_loss,
)
from tests.operators import Operators
from tests.ranks import on_ranks
from zeroshard.internals.foreach import foreach_sum_of_squares
from zeroshard.stepping.clipping import own_gradients, scale_

MAX_NORM = 0.3


def in_ddp(model, num_steps):
    replica, norms, losses = replicate(model), [], []
    made = made_by("AdamW", replica)
    for number in range(num_steps):
        loss = token_loss(replica, number)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(replica.parameters(), MAX_NORM).item())
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    return finish(replica, losses), norms


@on_ranks(2)
def test_clipping_is_that_of_torch_on_ddp_and_the_same_to_the_bit_at_all_stages():
    model = small_gpt()
    want, wanted_norms = in_ddp(model, 3)
    runs, norms, found = {}, {}, []
    for stage in ALL_STAGES:
        for way in ("config", "method", "engine.step")[: 3 if stage == 3 else 1]:
            options = {} if way == "method" else {"clip_grad_norm": MAX_NORM}
            engine, made = start(copy.deepcopy(model), stage=stage, **options)
            assert engine.grad_norm is None
            losses, norms[stage, way] = [], []
            for number in range(3):
                loss = token_loss(engine, number)
                losses.append(loss.item())
                loss.backward()
                if way == "method":
                    norm = engine.clip_grad_norm_(MAX_NORM)
                    assert norm.dtype is torch.float32
                    assert norm.dim() == 0
                    assert norm.item() == engine.grad_norm.item()
                if way == "engine.step":
                    engine.step()
                else:
                    made.step()
                    made.zero_grad()
                norms[stage, way].append(engine.grad_norm.item())
            runs[stage, way] = finish(engine, losses)
    for key, run in runs.items():
        found += differences(str(key), run, runs[0, "config"])
        found += [] if norms[key] == norms[0, "config"] else [(key, norms[key])]
    run = runs[0, "config"]
    assert min(wanted_norms) > MAX_NORM  # or nothing was clipped
    assert norms[0, "config"] == pytest.approx(wanted_norms, rel=1e-6)
    assert run.losses == pytest.approx(want.losses, rel=1e-6)
    assert not run.parameters or distance_of_all(run.parameters, want.parameters) <= 5e-5
    return found


@on_ranks(2)
def test_gradients_are_scaled_by_the_factor_of_torch_and_only_when_the_norm_is_too_large():
    model = small_gpt()
    replica = replicate(model)
    token_loss(replica, 0).backward()
    torch.nn.utils.clip_grad_norm_(replica.parameters(), MAX_NORM)
    want = flat_gradients(replica)
    for stage in STAGES:
        engine, _ = start(copy.deepcopy(model), stage=stage)
        token_loss(engine, 0).backward()
        before = full_gradients(engine)
        engine.clip_grad_norm_(1e9)
        untouched = full_gradients(engine)
        engine.clip_grad_norm_(MAX_NORM)
        clipped = full_gradients(engine)
        assert distance_of_all(before, untouched) == 0
        assert distance_of_all(clipped, want) <= 1e-6


@on_ranks(2)
def test_the_norm_is_that_of_the_accumulated_gradients():
    """Norms of two micro-batches, from engine.backward and from no_sync without a reducing backward."""
    model = small_gpt()
    replica = replicate(model)
    with replica.no_sync():
        (token_loss(replica, 0) / 2).backward()
    (token_loss(replica, 1) / 2).backward()
    norms = [torch.nn.utils.clip_grad_norm_(replica.parameters(), 1e9).item()]
    for stage in ALL_STAGES:
        engine, _ = start(copy.deepcopy(model), stage=stage, gradient_accumulation_steps=2)
        take_steps(engine, [0], token_loss)
        engine.backward(token_loss(engine, 1))
        norms.append(engine.clip_grad_norm_(1e9).item())
        engine, _ = start(copy.deepcopy(model), stage=stage)
        with engine.no_sync():
            for number in range(2):
                (token_loss(engine, number) / 2).backward()
        norms.append(engine.clip_grad_norm_(1e9).item())
    want, *norms = norms
    assert norms == pytest.approx([want] * len(norms), rel=1e-6)


@on_ranks(2)
def test_a_norm_that_is_not_finite_may_be_an_error_that_names_the_parameter():
    engine, _ = start(small_gpt())
    token_loss(engine, 0).backward()
    engine.get_parameter("gain").grad.fill_(math.nan)
    before = full_gradients(engine)
    for order in (1, 2, math.inf):
        with pytest.raises(RuntimeError, match="'gain'"):
            engine.clip_grad_norm_(1.0, norm_type=order, error_if_nonfinite=True)
    after = full_gradients(engine)
    assert all(torch.equal(before[n].nan_to_num(), after[n].nan_to_num()) for n in before)
    engine.clip_grad_norm_(1.0)
    assert engine.grad_norm.isnan()


NUM_BLOCKS = 3


def trained(depth, stage, **precision):
    """An engine of blocks of `depth` weights, with 256 elements a weight: no padding between parameters."""
    torch.manual_seed(0)
    layers = [[nn.Linear(16, 16, bias=False) for _ in range(depth)] for _ in range(NUM_BLOCKS)]
    model = nn.Sequential(*(nn.Sequential(*own) for own in layers))
    engine, _ = start(model, stage=stage, precision=precision)
    engine.backward(engine(torch.randn(5, 16)).square().mean())
    return engine


@on_ranks(2)
def test_kernels_of_a_norm_and_of_clipping_do_not_grow_with_the_parameters():
    found = []
    for depth in (4, 12):
        engine = trained(depth, 3)
        grads = [p.grad for p in engine.parameters()]
        with Operators() as squares:
            total = foreach_sum_of_squares(own_gradients(engine._runtime)).sum()
        whole = [grad.clone() for grad in grads]
        with Operators() as products:
            scale_(grads, torch.tensor(0.3))
        assert all(torch.equal(grad, old * 0.3) for grad, old in zip(grads, whole, strict=True))
        norm = engine._axes.dp_shard.sum(total, "test")().sqrt().float() * torch.tensor(0.3)
        torch.testing.assert_close(engine.clip_grad_norm_(1e9), norm, rtol=1e-6, atol=0)
        found.append((squares.num_kernels, products.num_kernels))
    assert found[0] == found[1]
    assert max(found[0]) <= 4


@on_ranks(2)
def test_gradients_of_bfloat16_are_scaled_in_float32():
    engine = trained(4, 3, main_dtype="bf16", param_dtype="bf16")
    grads = [p.grad for p in engine.parameters()]
    assert {grad.dtype for grad in grads} == {torch.bfloat16}
    factor = torch.tensor(0.3001)  # in bfloat16 it is 0.30078125
    want = [(grad.float() * factor).bfloat16() for grad in grads]
    scale_(grads, factor)
    assert all(map(torch.equal, grads, want))


@pytest.mark.gpu
def test_on_a_gpu_the_norm_is_that_of_float64_and_scaling_that_of_float32():
    generator = torch.Generator("cuda").manual_seed(0)
    flat = torch.randn(1 << 20, device="cuda", generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        whole = flat.to(dtype)
        parts = whole.split(1 << 14)
        want = whole.double().square().sum()
        torch.testing.assert_close(foreach_sum_of_squares(parts).sum(), want, rtol=1e-13, atol=0)
        factor = torch.tensor(0.3001, device="cuda")
        expected = (whole.float() * factor).to(dtype)
        scale_(parts, factor)
        assert torch.equal(whole, expected)
