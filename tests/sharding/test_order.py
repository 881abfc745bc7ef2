"""One order of units out of several."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from zeroshard.sharding.reducer import merge

ORDERS = st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=4)


@given(ORDERS)
def test_every_element_is_there_once(orders):
    merged = merge(orders)
    assert len(merged) == len(set(merged))
    assert set(merged) == {element for order in orders for element in order}


@given(st.lists(st.integers(), unique=True, max_size=8), st.data())
def test_orders_that_leave_out_parts_of_one_give_that_one_back(whole, data):
    kept = [data.draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole))) for _ in range(3)]
    parts = [[element for element, keep in zip(whole, flags, strict=True) if keep] for flags in kept]
    assert merge([whole, *parts]) == whole
    places = {element: place for place, element in enumerate(merge(parts))}
    assert all(places[a] < places[b] for part in parts[:1] for a, b in pairwise(part))


def test_a_new_element_goes_right_behind_the_one_before_it():
    assert merge([[0, 2, 3], [0, 1, 2, 3]]) == [0, 1, 2, 3]
    assert merge([[0, 2, 3], [5, 0, 3, 4]]) == [5, 0, 2, 3, 4]
    assert merge([[0, 1, 0, 2]]) == [0, 1, 2]
    assert merge([]) == []
