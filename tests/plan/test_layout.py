"""Who owns which element: properties over parameter sizes and numbers of ranks; pieces of a step."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from zeroshard.plan.layout import BLOCK, Layout, Span
from zeroshard.plan.pieces import cut

EDGES = st.sampled_from((0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK))
SIZES = st.lists(EDGES | st.integers(0, 5 * BLOCK) | st.integers(0, 40_000), max_size=6).map(tuple)
RANKS = st.integers(1, 8) | st.integers(1, 600)
LAYOUTS = st.builds(Layout, SIZES, RANKS, st.just(1) | st.integers(1, 9))
SPANS = st.tuples(st.integers(-40, 40), st.integers(0, 40)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))


def elements(span):
    return set(range(span.start, span.stop))


@given(LAYOUTS)
@example(Layout((), 3))
@example(Layout((1,), 4096))
@example(Layout((0, 0, 257), 2))
def test_every_element_of_every_parameter_is_owned_by_exactly_one_rank(layout):
    for index, size in enumerate(layout.sizes):
        parts = [layout.owned(index, rank) for rank in range(layout.num_ranks)]
        assert all(0 <= part.start <= part.stop <= size for part in parts)
        parts = [part for part in parts if part.size]
        # End to end from the first element to the last: no element is left out, and none is there twice.
        ends = [0, *(part.stop for part in parts)]
        assert [part.start for part in parts] == ends[:-1]
        assert ends[-1] == size


@given(LAYOUTS)
def test_shards_are_equal_whole_blocks_and_tile_the_range_in_rank_order(layout):
    shards = [layout.shard(rank) for rank in range(layout.num_ranks)]
    assert {shard.size for shard in shards} == {layout.shard_size}
    assert layout.shard_size % (BLOCK * layout.num_replicas) == 0
    assert [shard.start for shard in shards] == [0, *(shard.stop for shard in shards[:-1])]
    assert shards[-1].stop == layout.total


@given(LAYOUTS)
def test_each_parameter_starts_on_a_block_and_none_overlaps_the_next(layout):
    spans = [layout.parameter(index) for index in range(len(layout.sizes))]
    assert [span.size for span in spans] == list(layout.sizes)
    assert [span.start for span in spans] == list(layout.offsets)
    assert all(span.start % BLOCK == 0 for span in spans)
    assert all(span.stop <= following.start for span, following in pairwise(spans))
    assert all(span.stop <= layout.total for span in spans)


@given(st.lists(EDGES | st.integers(0, 5 * BLOCK), max_size=5).map(tuple), st.integers(1, 40))
def test_a_part_is_the_same_in_its_parameter_its_shard_and_the_flat_range(sizes, num_ranks):
    layout = Layout(sizes, num_ranks)
    parameters = [np.arange(size) + 10_000 * (index + 1) for index, size in enumerate(sizes)]
    flat = np.zeros(layout.total, dtype=int)
    for index, values in enumerate(parameters):
        flat[layout.parameter(index).slice] = values
    for rank in range(num_ranks):
        shard = flat[layout.shard(rank).slice]
        for index, values in enumerate(parameters):
            inside = layout.parameter(index).intersect(layout.shard(rank)).shifted(-rank * layout.shard_size)
            assert 0 <= inside.start <= inside.stop <= layout.shard_size
            assert np.array_equal(shard[inside.slice], values[layout.owned(index, rank).slice])


@given(st.lists(EDGES | st.integers(0, 5 * BLOCK), max_size=6).map(tuple), st.integers(1, 40))
@example((), 4)
def test_gaps_are_exactly_what_no_parameter_covers(sizes, num_ranks):
    layout = Layout(sizes, num_ranks)
    covered = np.zeros(layout.total, dtype=int)
    for index in range(len(sizes)):
        covered[layout.parameter(index).slice] += 1
    for gap in layout.gaps:
        assert gap.size > 0
        covered[gap.slice] += 1
    assert (covered == 1).all()
    assert list(layout.gaps) == sorted(layout.gaps, key=lambda gap: gap.start)


def test_the_drawing_of_two_parameters_over_two_ranks_is_as_drawn():
    layout = Layout((600, 200), 2)
    assert layout.offsets == (0, 768)
    assert (layout.total, layout.shard_size) == (1024, 512)
    assert [layout.owned(0, rank) for rank in range(2)] == [Span(0, 512), Span(512, 600)]
    assert layout.owned(1, 0).size == 0
    assert layout.owned(1, 1) == Span(0, 200)
    assert layout.gaps == (Span(600, 768), Span(968, 1024))


@given(SPANS, SPANS)
def test_an_intersection_holds_the_common_elements_and_lies_inside_the_other_span(one, other):
    common = one.intersect(other)
    assert elements(common) == elements(one) & elements(other)
    assert other.start <= common.start <= common.stop <= other.stop


@pytest.mark.parametrize("size", [0, 1, 256, 257, 1024, 3000, 5000])
@pytest.mark.parametrize("most", [256, 1024, 10_000])
def test_pieces_hold_each_element_once_and_begin_on_blocks(size: int, most: int) -> None:
    pieces = cut(size, most)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])][: len(pieces)]
    assert sum(piece.size for piece in pieces) == size
    assert all(piece.start % BLOCK == 0 and piece.size <= most + BLOCK for piece in pieces)
