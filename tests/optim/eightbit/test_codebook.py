"""Exact nearest codes: against a search over all values, and bitsandbytes' own map."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.optim.eightbit.reference import SIGNED, UNSIGNED
from zeroshard.optim.eightbit.blocks import codebook

CPU = torch.device("cpu")
MAPS = {True: SIGNED, False: UNSIGNED}


def by_search(x, values):
    """The nearest, ties to the lower code, in exact arithmetic."""
    return (x.double()[:, None] - values.double()).abs().argmin(1)


@pytest.mark.parametrize("is_signed", [True, False])
def test_values_are_those_of_the_published_map(is_signed):
    assert torch.equal(codebook(is_signed, CPU).values, MAPS[is_signed])


@pytest.mark.parametrize("is_signed", [True, False])
def test_values_are_those_of_bitsandbytes(is_signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(codebook(is_signed, CPU).values, functional.create_dynamic_map(signed=is_signed).cpu())


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_the_nearest_at_and_around_every_value_and_midpoint(is_signed):
    book, values = codebook(is_signed, CPU), MAPS[is_signed]
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    points = torch.cat([values, middles])
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    x = torch.cat([points, points.nextafter(up), points.nextafter(down)]).clamp(values[0].item(), 1.0)
    assert torch.equal(book.nearest(x).long(), by_search(x, values))


@pytest.mark.long_where(is_signed=[False])
@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_the_nearest_of_values_of_all_magnitudes(is_signed):
    book, values = codebook(is_signed, CPU), MAPS[is_signed]
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.rand(50_000, generator=generator)
    magnitudes *= torch.rand(50_000, generator=generator).mul(-20).exp()
    x = torch.cat([magnitudes, -magnitudes]) if is_signed else magnitudes
    for part in x.split(20_000):
        assert torch.equal(book.nearest(part).long(), by_search(part, values))


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50))
def test_codes_are_the_nearest_of_any_float(numbers):
    x = torch.tensor(numbers)
    assert torch.equal(codebook(True, CPU).nearest(x).long(), by_search(x, SIGNED))
    x = x.abs()
    assert torch.equal(codebook(False, CPU).nearest(x).long(), by_search(x, UNSIGNED))


@pytest.mark.parametrize("is_signed", [True, False])
def test_zeros_of_both_signs_and_the_smallest_floats_are_the_code_of_zero(is_signed):
    book = codebook(is_signed, CPU)
    x = torch.tensor([0.0, -0.0, 1e-45, 1e-38, 1e-8])
    assert (book.nearest(x) == book.zero).all()
    assert book.values[book.zero] == 0
