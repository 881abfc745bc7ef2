"""Owners of whole tensors, and what ranks send: each element once, at costs near the least."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from zeroshard.plan.layout import BLOCK, Layout, Span
from zeroshard.plan.owners import SLACK, Item, choose_owners, inward, outward


@st.composite
def sharded(draw, most_ranks=8, most_items=12):
    """Items as a layout cuts them over groups of ranks, and the number of ranks; some are held whole."""
    num_shards, num_copies = draw(st.integers(1, most_ranks)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 6 * BLOCK), max_size=most_items))
    layout = Layout(tuple(sizes), num_shards)
    items = []
    for index, size in enumerate(sizes):
        is_whole = draw(st.booleans())
        held = [Span(0, size) if is_whole else layout.owned(index, rank) for rank in range(num_shards)]
        items.append(Item(size, draw(st.integers(0, 50)), tuple(held * num_copies)))
    return items, num_shards * num_copies


def loads(items, owners, num_ranks):
    pairs = list(zip(items, owners, strict=True))
    return [sum(item.cost for item, owner in pairs if owner == rank) for rank in range(num_ranks)]


@given(sharded())
def test_every_owner_gets_each_element_once_and_none_that_it_holds(case):
    items, num_ranks = case
    owners = choose_owners(items, num_ranks, {})
    moves = inward(items, owners)
    for number, (item, owner) in enumerate(zip(items, owners, strict=True)):
        own = item.held[owner]
        seen = list(range(own.start, own.stop))
        for move in moves:
            if move.item == number:
                assert move.target == owner != move.source
                assert move.span.intersect(item.held[move.source]) == move.span
                seen += range(move.span.start, move.span.stop)
        assert sorted(seen) == list(range(item.size))


@given(sharded())
def test_every_rank_gets_the_update_of_what_it_holds_unless_it_computes_it(case):
    items, num_ranks = case
    owners = choose_owners(items, num_ranks, {})
    got = {(move.item, move.target): (move.source, move.span) for move in outward(items, owners)}
    want = {
        (number, rank): (owners[number], span)
        for number, item in enumerate(items)
        for rank, span in enumerate(item.held)
        if rank != owners[number] and span.size
    }
    assert got == want
    assert len(outward(items, owners)) == len(got)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 3), st.randoms())
def test_the_busiest_rank_has_at_most_grahams_bound_of_the_least_possible(costs, num_ranks, random):
    items = []
    for cost in costs:
        ends = sorted(random.randint(0, 9) for _ in range(num_ranks - 1))
        held = [Span(*pair) for pair in itertools.pairwise((0, *ends, 9))]
        items.append(Item(9, cost, tuple(held)))
    choices = itertools.product(range(num_ranks), repeat=len(items))
    least = min(max(loads(items, owners, num_ranks)) for owners in choices)
    bound = (1 + SLACK) * (4 / 3 - 1 / (3 * num_ranks))
    assert max(loads(items, choose_owners(items, num_ranks, {}), num_ranks)) <= bound * least


@given(sharded(), st.data())
def test_owners_that_are_kept_stay(case, data):
    items, num_ranks = case
    numbers = data.draw(st.sets(st.integers(0, len(items) - 1))) if items else set()
    kept = {number: data.draw(st.integers(0, num_ranks - 1)) for number in numbers}
    owners = choose_owners(items, num_ranks, kept)
    assert {number: owners[number] for number in kept} == kept
    assert all(0 <= owner < num_ranks for owner in owners)


@pytest.mark.parametrize(("owner", "source"), [(0, 1), (1, 0), (2, 3), (3, 2)])
def test_missing_elements_come_from_the_nearest_rank_that_holds_them(owner, source):
    half = Span(0, 5), Span(5, 10)
    item = Item(10, 1, (*half, *half))
    assert [move.source for move in inward([item], [owner])] == [source]
