"""Box arithmetic against NumPy's indexing: each element of a tensor holds its own flat index."""

import math

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from zeroshard.checkpoint.places import Box, boxes_of, split, whole
from zeroshard.plan.layout import Span

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
FULL_SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def spans(draw, shapes=SHAPES):
    """A shape and a flat range of its elements."""
    shape = draw(shapes)
    ends = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(ends), draw(ends)))
    return shape, Span(start, stop)


@st.composite
def boxes(draw, shape):
    """Any box of a shape that has elements."""
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


def elements(shape, box):
    """The flat indices of a box's elements, row by row."""
    index = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
    return np.arange(math.prod(shape)).reshape(shape)[index].flatten().tolist()


def all_elements(shape, parts):
    return [element for part in parts for element in elements(shape, part)]


@given(spans())
def test_the_boxes_of_a_flat_range_hold_its_elements_in_order_and_are_few(case):
    shape, span = case
    found = boxes_of(shape, span)
    assert all_elements(shape, found) == list(range(span.start, span.stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel == len(elements(shape, box)) > 0 for box in found)


def test_boxes_are_whole_rows_where_the_range_is():
    assert boxes_of((4, 6), Span(3, 20)) == [Box((0, 3), (1, 3)), Box((1, 0), (2, 6)), Box((3, 0), (1, 2))]
    assert boxes_of((4, 6), Span(6, 18)) == [Box((1, 0), (2, 6))]
    assert boxes_of((4, 6), Span(0, 24)) == [whole((4, 6))]
    assert boxes_of((), Span(0, 1)) == [whole(())]
    assert len(boxes_of((4, 6, 5), Span(1, 119))) == 5


@given(FULL_SHAPES.flatmap(lambda shape: boxes(shape).map(lambda box: (shape, box))), st.integers(1, 40))
def test_pieces_of_any_box_are_cut_along_as_few_dimensions_as_can_be(case, limit):
    shape, box = case
    pieces = list(split(box, limit))
    assert sorted(all_elements(shape, pieces)) == sorted(elements(shape, box))
    assert all(0 < piece.numel <= limit for piece in pieces)
    row = math.prod(box.sizes[1:])
    if row <= limit:
        assert all(piece.sizes[1:] == box.sizes[1:] for piece in pieces)
        assert len(pieces) == math.ceil(math.prod(box.sizes[:1]) / (limit // row))


@given(FULL_SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape), boxes(shape))))
def test_the_elements_that_two_boxes_share_have_an_index_and_a_short_range_in_each(case):
    shape, *pair = case
    shared = set(elements(shape, pair[0])) & set(elements(shape, pair[1]))
    common = pair[0].intersect(pair[1])
    assert (common is None) == (not shared)
    for box in pair if common is not None else ():
        stored = np.array(elements(shape, box)).reshape(box.sizes)
        assert set(stored[common.within(box)].flatten().tolist()) == shared
        span = common.span_in(box)
        assert shared <= set(stored.flatten()[span.slice].tolist())
        assert {stored.flatten()[span.start], stored.flatten()[span.stop - 1]} <= shared
