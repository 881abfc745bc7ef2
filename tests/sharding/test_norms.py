"""Norms of whole parameters."""

import torch

from zeroshard.sharding.norms import sum_of_squares, whole_norms


def test_squares_are_added_up_in_float64_over_any_number_of_elements():
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(3_000_001, generator=generator)
    large[-1] = 1e4  # in float32, most of the others would be lost beside its square
    tensors = [large, large.reshape(-1, 1)[::2], torch.zeros(0, 3), torch.tensor(-3.0), large[:5].bfloat16()]
    want = torch.stack([tensor.double().square().sum() for tensor in tensors])
    got = sum_of_squares(tensors)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    torch.testing.assert_close(whole_norms(tensors, tensors), want.sqrt(), rtol=1e-13, atol=0)
