"""Norm, finiteness and clipping over the runs of memory that the gradients of a buffer form.

Accelerators take these paths; here they run on the gradients of CPU ranks.
"""

import math

import pytest
import torch
from torch import nn

from tests.distributed.training import SOME_STAGES, start
from tests.operators import Operators
from tests.ranks import on_ranks
from zeroshard.internals.foreach import foreach_sum_of_squares
from zeroshard.stepping.clipping import contiguous_runs, global_norm, own_gradients, scale_

NUM_BLOCKS = 3


class Blocks(nn.Module):
    """Blocks of `depth` weights each, with 256 elements a weight: no padding between parameters."""

    def __init__(self, depth):
        super().__init__()
        torch.manual_seed(0)
        block = lambda: nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(depth)])  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def trained(depth, stage, **precision):
    engine, _ = start(Blocks(depth), stage=stage, precision=precision)
    engine.backward(engine(torch.randn(5, 16)).square().mean())
    return engine


def sums_and_kernels(depth):
    """By stage, the numbers of buffers, runs, and kernels of both computations."""
    found = []
    for stage in SOME_STAGES:
        engine = trained(depth, stage)
        runtime, axis = engine._runtime, engine._axes.dp_shard
        grads = [p.grad for p in engine.parameters()]
        with Operators() as squares:
            runs = contiguous_runs(own_gradients(runtime))
            total = foreach_sum_of_squares(runs).sum()
        whole = [grad.clone() for grad in grads]
        with Operators() as products:
            scale_(grads, torch.tensor(0.3))
        assert all(torch.equal(grad, old * 0.3) for grad, old in zip(grads, whole, strict=True))
        scale_(grads, torch.tensor(1.0))
        norm = axis.sum(total, "test").sqrt().float() * torch.tensor(0.3)
        torch.testing.assert_close(engine.clip_grad_norm_(1e9), norm, rtol=1e-6, atol=0)
        kernels = squares.num_kernels, products.num_kernels
        found.append((len(list(runtime.buffers)), len(runs), len(contiguous_runs(grads)), kernels))
    return found


def test_a_buffer_without_padding_is_one_run_and_kernels_do_not_grow_with_its_parameters(ranks):
    few, many = ranks(2, sums_and_kernels, 4), ranks(2, sums_and_kernels, 12)
    for one, other in zip([*few[0], *few[1]], [*many[0], *many[1]], strict=True):
        num_buffers, num_own, num_whole, kernels = other
        assert num_buffers == NUM_BLOCKS
        assert num_own == num_whole == NUM_BLOCKS
        assert one == other
        assert max(kernels) <= 4


@on_ranks(2)
def test_gradients_of_bfloat16_are_scaled_in_float32_with_one_kernel_per_buffer():
    engine = trained(4, 3, main_dtype="bf16", param_dtype="bf16")
    grads = [p.grad for p in engine.parameters()]
    assert {grad.dtype for grad in grads} == {torch.bfloat16}
    factor = torch.tensor(0.3001)  # in bfloat16 it is 0.30078125
    want = [(grad.float() * factor).bfloat16() for grad in grads]
    with Operators() as products:
        scale_(grads, factor)
    same = all(torch.equal(grad, expected) for grad, expected in zip(grads, want, strict=True))
    assert (same, products.num_kernels) == (True, NUM_BLOCKS)


@on_ranks(2)
def test_gradients_that_the_user_replaced_count_like_the_others():
    """A gradient of the user's is clipped like the others, and found where it is not finite."""
    engine = trained(4, 3)
    own = [p for p in engine.parameters() if p.numel()]
    own[0].grad = torch.full_like(own[0].grad, 3.0)
    want = torch.cat([p.grad for p in own]).double().square().sum()
    norm = engine._axes.dp_shard.sum(want, "test").sqrt()
    got = engine.clip_grad_norm_(1.0)
    clipped = torch.allclose(own[0].grad, 3.0 / got)
    finite = [bool(global_norm(engine._runtime).isfinite())]
    own[0].grad[-1] = math.nan
    finite.append(bool(global_norm(engine._runtime).isfinite()))
    off = abs(got.item() / norm.item() - 1)
    assert off <= 1e-6
    assert clipped
    assert finite == [True, False]


@pytest.mark.gpu
def test_on_a_gpu_the_norm_of_runs_is_that_of_float64_and_scaling_that_of_float32():
    generator = torch.Generator("cuda").manual_seed(0)
    flat = torch.randn(1 << 20, device="cuda", generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        parts = flat.to(dtype).split(1 << 14)
        (run,) = contiguous_runs(parts)
        want = run.double().square().sum()
        torch.testing.assert_close(foreach_sum_of_squares([run])[0], want, rtol=1e-13, atol=0)
        factor = torch.tensor(0.3001, device="cuda")
        expected = (run.float() * factor).to(dtype)
        scale_(parts, factor)
        assert torch.equal(run, expected)
