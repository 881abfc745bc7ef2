"""A unit stays gathered as long as somebody has a lease on it."""

from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import given

from zeroshard.sharding.walk import Lease


class Unit(SimpleNamespace):
    __hash__ = object.__hash__

    def __init__(self):
        super().__init__(leases=set(), is_gathered=True)

    def reshard(self, for_backward):
        self.is_gathered = False


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3))))
def test_the_leases_of_a_unit_are_those_that_were_taken_and_did_not_end(moves):
    leases, units = [Lease() for _ in range(3)], [Unit() for _ in range(4)]
    held = set()
    for takes, lease, unit in moves:
        if takes:
            units[unit].is_gathered = True
            leases[lease].take(units[unit])
            held.add((lease, unit))
        else:
            leases[lease].end((units[unit],))
            held.discard((lease, unit))
            assert units[unit].is_gathered == bool(units[unit].leases)
        for number, one in enumerate(units):
            assert one.leases == {leases[n] for n, m in held if m == number}
        for number, one in enumerate(leases):
            assert set(one.units) == {units[m] for n, m in held if n == number}
            assert bool(one.units) == any(n == number for n, _ in held)
