"""Norms of whole parameters, and tensors that lie side by side in memory, joined."""

import math

import pytest
import torch

from zeroshard.internals.foreach import foreach_sum_of_squares
from zeroshard.stepping.norms import sum_of_powers


def tensors_of_all_sizes():
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(3_000_001, generator=generator)
    large[-1] = 1e4  # in float32, most of the others would be lost beside its square
    return [large, large.reshape(-1, 1)[::2], torch.zeros(0, 3), torch.tensor(-3.0), large[:5].bfloat16()]


@pytest.mark.parametrize("compute", [sum_of_powers, foreach_sum_of_squares])
def test_squares_are_added_up_in_float64_over_any_number_of_elements(compute):
    tensors = tensors_of_all_sizes()
    want = torch.stack([tensor.double().square().sum() for tensor in tensors])
    got = compute(tensors)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


def test_however_gradients_are_cut_their_norm_rounds_to_the_same_float32():
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        flat = torch.randn(10_000, generator=generator)
        norms = {
            foreach_sum_of_squares(flat.split(size)).sum().sqrt().float().item()
            for size in (256, 1000, 4096, 10_000)
        }
        assert len(norms) == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [sum_of_powers, foreach_sum_of_squares])
def test_a_sum_is_not_finite_exactly_where_an_element_is_not(value, dtype, compute):
    tensors = [torch.full((1000,), torch.finfo(dtype).max, dtype=dtype), torch.zeros(70_000, dtype=dtype)]
    tensors[1][65_535] = value
    assert compute(tensors).isfinite().tolist() == [True, False]
