"""Parts of parameters over a tensor group: every element is held once."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.parameters.parts import part_of
from zeroshard.plan.cuts import Cut, Section, heads
from zeroshard.plan.layout import Span


@st.composite
def cuts(draw):
    num_ranks = draw(st.integers(1, 8))
    sections = []
    for _ in range(draw(st.integers(1, 4))):
        unit = draw(st.integers(1, 5))
        num_heads = num_ranks * draw(st.integers(1, 3))
        sections.append(Section(num_heads * unit, unit))
    around = draw(st.tuples(*[st.integers(1, 3)] * 2))
    dim = draw(st.integers(0, 2))
    shape = [*around]
    shape.insert(dim, sum(section.size for section in sections))
    return Cut("weight", tuple(shape), dim, num_ranks, tuple(sections))


@given(cuts())
def test_each_element_is_held_once(cut):
    held = []
    for rank in range(cut.num_ranks):
        own = [index for span in cut.spans(rank) for index in range(span.start, span.stop)]
        assert len(own) == cut.local_shape[cut.dim]
        held += own
    assert sorted(held) == list(range(cut.shape[cut.dim]))
    assert cut.local_shape[: cut.dim] == cut.shape[: cut.dim]
    assert cut.local_shape[cut.dim + 1 :] == cut.shape[cut.dim + 1 :]


@given(cuts())
def test_each_rank_has_whole_heads_of_each_section(cut):
    start = 0
    for number, section in enumerate(cut.sections):
        for rank in range(cut.num_ranks):
            span = cut.spans(rank)[number]
            assert span.size
            assert span.size % section.unit == (span.start - start) % section.unit == 0
            assert start <= span.start
            assert span.stop <= start + section.size
        start += section.size


@given(cuts(), st.data())
def test_runs_make_up_any_range_of_a_part(cut, data):
    rank = data.draw(st.integers(0, cut.num_ranks - 1))
    numbers = torch.arange(math.prod(cut.shape)).view(cut.shape)
    own = part_of(numbers, cut, rank).reshape(-1)
    start = data.draw(st.integers(0, own.numel()))
    within = Span(start, data.draw(st.integers(start, own.numel())))
    found = [number for run in cut.runs(rank, within) for number in range(run.start, run.stop)]
    assert found == own[within.slice].tolist()


def test_queries_keys_and_values_in_one():
    cut = Cut("qkv", (16, 3), 0, 2, heads(4, 2, 2, size=2))
    assert cut.spans(0) == (Span(0, 4), Span(8, 10), Span(12, 14))
    assert cut.spans(1) == (Span(4, 8), Span(10, 12), Span(14, 16))
    assert cut.local_shape == (8, 3)


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (lambda: Cut("w", (6, 2), 0, 4), "'w', dimension 0 of shape (6, 2): 6 elements cannot be divided "
         "over mesh.tp=4 ranks; expected a multiple of 4"),
        (lambda: Cut("w", (2,), 0, 4), "2 elements cannot be divided over mesh.tp=4 ranks"),
        (lambda: Cut("w", (6, 2), 0, 4, heads(3, size=2)), "3 heads of 2 cannot be divided over mesh.tp=4 "
         "ranks; expected a multiple of 4"),
        (lambda: Cut("w", (6, 2), 0, 2, (Section(6, 4),)), "6 elements are no whole heads of 4"),
        (lambda: Cut("w", (6, 2), 0, 2, heads(2, size=2)), "expected sections of 6 elements together"),
        (lambda: Cut("w", (6, 2), 0, 2, (Section(6), Section(0))), "0 elements are no whole heads of 1"),
    ],
)  # fmt: skip
def test_errors_tell_the_numbers(cut, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        cut()
