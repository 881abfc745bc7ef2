"""Norms of whole parameters, and tensors that lie side by side in memory, joined."""

import math

import pytest
import torch

from zeroshard.internals.foreach import foreach_sum_of_squares
from zeroshard.plan.layout import Layout
from zeroshard.stepping.clipping import contiguous_runs
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


def places(runs):
    return [(run.storage_offset(), run.numel()) for run in runs]


def test_adjacent_slices_of_one_tensor_become_one_run_over_the_same_memory():
    flat = torch.arange(10.0)
    (run,) = contiguous_runs([flat[0:3], flat[3:7], flat[7:10]])
    assert torch.equal(run, flat)
    assert run.data_ptr() == flat.data_ptr()


def test_a_gap_ends_a_run_so_that_padding_is_never_read():
    flat = torch.full((12,), float("nan"))
    parts = [flat[0:3].fill_(1), flat[4:6].fill_(2), flat[6:9].fill_(3)]
    runs = contiguous_runs(parts)
    assert places(runs) == [(0, 3), (4, 5)]
    assert not torch.cat(runs).isnan().any()


def test_neighbours_of_other_storages_or_dtypes_are_not_joined():
    memory = torch.zeros(32, dtype=torch.uint8)
    wide, narrow = memory[:16].view(torch.float32), memory[8:].view(torch.bfloat16)
    assert narrow.storage_offset() == wide.numel()  # in elements, the one begins where the other ends
    assert len(contiguous_runs([wide, narrow])) == 2
    assert len(contiguous_runs([torch.zeros(3), torch.zeros(3)])) == 2


def test_a_strided_tensor_is_a_run_by_itself_and_nothing_joins_it():
    flat = torch.zeros(12)
    assert places(contiguous_runs([flat[0:4], flat[4:8:2], flat[6:8], flat[8:12]])) == [
        (0, 4),
        (4, 2),
        (6, 6),
    ]


@pytest.mark.parametrize(
    ("sizes", "num_runs"),
    [((512, 256, 1024), 1), ((512, 100, 1024, 7), 2), ((1, 1, 1), 3)],
)
def test_the_gradients_of_a_layout_form_one_run_more_for_each_padding_between_them(sizes, num_runs):
    layout = Layout(sizes, num_ranks=1)
    flat = torch.zeros(layout.total)
    runs = contiguous_runs([flat[layout.parameter(index).slice] for index in range(len(sizes))])
    assert len(runs) == num_runs
    assert sum(run.numel() for run in runs) == sum(sizes)
