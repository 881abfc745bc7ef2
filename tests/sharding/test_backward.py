"""The walk of a backward with units that note what happens; leases; one order of units out of several."""

import ast
import inspect
import textwrap
from itertools import pairwise
from types import SimpleNamespace

import hypothesis.strategies as st
import torch
from hypothesis import given

from zeroshard.sharding.passes import Passes
from zeroshard.sharding.reducer import merge
from zeroshard.sharding.unit import ForwardCall, Ticks
from zeroshard.sharding.walk import CallLog, Lease, Visit, Walk, plan_turns


class Noting:
    """A unit that notes its collectives in a log that all units share."""

    joins_backward, is_resident = True, False
    freed_inside = recomputed_in = ()

    def __init__(self, name, log):
        self.name, self.log = name, log
        self.slots = SimpleNamespace(uninstall=lambda: None)
        self.leases, self.under_way, self.in_files = set(), [], []
        self.is_complete = self.is_gathered = False

    def __repr__(self):
        return self.name

    def unshard(self):
        if not self.is_gathered:
            self.is_gathered = True
            self.log.append(f"gather {self.name}")

    def read_ahead(self):
        self.is_read = True

    def reshard(self, for_backward):
        self.is_gathered = False


class NotingReducer:
    def __init__(self, log):
        self.log, self.started = log, set()

    def start(self, unit):
        if unit not in self.started:
            self.started.add(unit)
            self.log.append(f"reduce {unit.name}")


def forward(tree, log, num_forwards=1):
    """Units and calls of a forward: `tree` is (name, [children]); a name may come several times."""
    units, calls, clock = {}, [], 0

    def run(node):
        nonlocal clock
        name, children = node
        clock += 1
        call = ForwardCall(units.setdefault(name, Noting(name, log)), Ticks(clock))
        for child in children:
            run(child)
        clock += 1
        call.ticks.ended = clock
        calls.append(call)

    for _ in range(num_forwards):
        run(tree)
    return list(units.values()), calls


def visits(calls):
    """The first and the last call of each unit, in any order."""
    spans = {}
    for call in sorted(calls, key=lambda call: call.ticks.began):
        spans.setdefault(call.unit, []).append(call.ticks)
    around = {unit: [span.around for span in own if span.around] for unit, own in spans.items()}
    return {
        unit: Visit(own[0], max(own, key=lambda span: span.ended), (around[unit] or [None])[-1])
        for unit, own in spans.items()
    }


def around(*spans):
    """Put calls into one checkpoint, in the order of their ends."""
    checkpoint = Ticks(min(span.began for span in spans), spans[-1].ended)
    for span in spans:
        span.around = checkpoint


def leaves(*names):
    return [(name, []) for name in names]


def described(turns):
    """The turns other than those in which a unit that was left is freed."""
    return [f"{turn.act} {turn.unit}" for turn in reversed(turns) if turn.act != "free"]


def test_the_turns_of_the_example_in_the_docstring():
    _, calls = forward(("root", [("a", []), ("b", leaves("c"))]), [])
    words = "gather root, gather b, gather c, leave c, leave b, gather a, leave a, leave root"
    assert described(plan_turns(visits(calls), 0)) == words.split(", ")


def test_a_unit_is_entered_at_its_last_call_and_left_at_its_first():
    _, calls = forward(("root", leaves("a", "b", "a", "c", "b")), [])
    words = "gather root, gather b, gather c, leave c, gather a, leave b, leave a, leave root"
    assert described(plan_turns(visits(calls), 0)) == words.split(", ")


def test_units_are_gathered_ahead_when_others_are_entered():
    _, calls = forward(("root", [("a", []), ("b", leaves("c"))]), [])
    words = "gather root, gather b, gather c, gather a, leave c, leave b, leave a, leave root"
    assert described(plan_turns(visits(calls), 1)) == words.split(", ")


def test_values_in_files_are_read_ahead_when_the_unit_before_is_gathered():
    units, calls = forward(("root", leaves("a", "b", "c")), [])
    units[1].in_files = ["a buffer"]
    words = "gather root, gather c, gather b, read a, leave c, gather a, leave b, leave a, leave root"
    assert described(plan_turns(visits(calls), 1)) == words.split(", ")


def test_units_inside_a_checkpoint_are_entered_together_the_last_one_first():
    _, calls = forward(("root", [("a", leaves("x", "y")), ("z", [])]), [])
    around(*(call.ticks for call in calls if call.unit.name in "xy"))
    words = (
        "gather root, gather z, leave z, gather a, gather y, gather x, leave y, leave x, leave a, leave root"
    )
    assert described(plan_turns(visits(calls), 0)) == words.split(", ")


NAMES = st.sampled_from("abcdefg")
TREES = st.recursive(
    st.tuples(NAMES, st.just([])), lambda inside: st.tuples(NAMES, st.lists(inside, max_size=3)), max_leaves=9
)
FORWARDS = st.tuples(st.lists(TREES, min_size=1, max_size=5), st.integers(1, 2))


@given(FORWARDS)
def test_each_called_unit_is_entered_left_and_freed_at_ticks_that_fall(case):
    units, calls = forward(("root", case[0]), [], case[1])
    turns = plan_turns(visits(calls), 0)[::-1]
    assert all(a.tick > b.tick or (b.act == "free" and a.tick == b.tick) for a, b in pairwise(turns))
    for unit in units:
        own = [turn for turn in turns if turn.unit is unit]
        assert [turn.act for turn in own] == ["gather", "leave", "free"]
        assert own[0].tick == max(call.ticks.ended for call in calls if call.unit is unit)
        began = min(call.ticks.began for call in calls if call.unit is unit)
        assert own[1].tick == own[2].tick == began


def collectives(case, num_prefetch, entered, completes, checkpoints=frozenset()):
    """The collectives of a rank to whose calls numbered `entered` gradients come, in autograd's order.

    Children of the root numbered `checkpoints` are run again when the first gradient comes to one of their
    calls.
    """
    log = []
    _, calls = forward(("root", case[0]), log, case[1])
    regions = checkpointed(case[0], calls, checkpoints) if case[1] == 1 else {}
    own = visits(calls)
    walk = Walk(own, NotingReducer(log), Lease(), num_prefetch=num_prefetch)
    for number, call in sorted(enumerate(calls), key=lambda item: -item[1].ticks.ended):
        if number not in entered:
            continue
        if inside := regions.pop(call, None):
            for again in inside:
                regions.pop(again, None)
                walk.enter_again(again.unit)
                again.unit.unshard()
        walk.enter(call)
        call.unit.unshard()
        if number in completes and call.ticks is own[call.unit].first:
            call.unit.is_complete = True
            walk.note_gradient(call.unit)
    walk.take()
    return log


def checkpointed(children, calls, checkpoints):
    """Put units into checkpoints; return the calls of each checkpoint, in order, by each of them."""
    regions, left = {}, sorted(calls, key=lambda call: call.ticks.began)[1:]
    for number, child in enumerate(children):
        inside, left = left[: size_of(child)], left[size_of(child) :]
        if number in checkpoints:
            around(*sorted((call.ticks for call in inside), key=lambda span: span.ended))
            regions |= dict.fromkeys(inside, inside)
    return regions


def size_of(node):
    return 1 + sum(map(size_of, node[1]))


SUBSETS = st.sets(st.integers(0, 30))


@given(FORWARDS, st.integers(0, 3), SUBSETS, SUBSETS, st.sets(st.integers(0, 4)))
def test_all_ranks_issue_the_same_collectives_in_one_order_whatever_gradients_come(
    case, num_prefetch, entered, completes, checkpoints
):
    everything = collectives(case, num_prefetch, set(range(100)), set(), checkpoints)
    assert collectives(case, num_prefetch, set(), set(), checkpoints) == everything
    assert collectives(case, num_prefetch, entered, completes, checkpoints) == everything
    names = {word.split()[1] for word in everything}
    assert sorted(everything) == sorted(f"{verb} {name}" for verb in ("gather", "reduce") for name in names)


@given(FORWARDS, st.integers(0, 3))
def test_at_most_the_units_ahead_and_those_around_are_gathered(case, num_prefetch):
    log = []
    units, calls = forward(("root", case[0]), log)
    turns = plan_turns(visits(calls), 0)[::-1]
    walk = Walk(visits(calls), NotingReducer(log), Lease(), num_prefetch=num_prefetch)
    inside = 0
    for turn in turns:
        walk.take(turn.tick)
        inside += {"gather": 1, "leave": 0, "free": -1}[turn.act]
        assert sum(unit.is_gathered for unit in units) <= inside + num_prefetch


def test_a_unit_that_was_left_stays_for_the_second_forward_of_its_checkpoint():
    """The gradient of c is cut here, that of b is not: the second forward calls c nevertheless."""
    log = []
    _, calls = forward(("root", leaves("a", "b", "c", "d")), log)
    by_name = {call.unit.name: call for call in calls}
    around(by_name["b"].ticks, by_name["c"].ticks)
    c = by_name["c"].unit
    walk = Walk(visits(calls), NotingReducer(log), Lease())
    walk.enter(by_name["b"])
    assert log == ["gather root", "gather d", "reduce d", "gather c", "gather b", "reduce c"]
    assert c.is_gathered
    walk.enter_again(by_name["b"].unit)
    walk.enter_again(c)
    assert c.is_gathered
    walk.enter(by_name["b"])
    assert c.is_gathered
    walk.enter(by_name["a"])
    assert not c.is_gathered


def test_a_unit_in_a_checkpoint_without_a_second_forward_is_freed_when_the_checkpoint_is_passed():
    log = []
    units, calls = forward(("root", leaves("a", "b", "c")), log)
    by_name = {call.unit.name: call for call in calls}
    around(by_name["b"].ticks, by_name["c"].ticks)
    walk = Walk(visits(calls), NotingReducer(log), Lease())
    walk.enter(by_name["a"])
    assert [unit.name for unit in units if unit.is_gathered] == ["root", "a"]


@torch.no_grad()
def test_a_forward_without_a_backward_lists_each_unit_once():
    root, *blocks = units = [Noting(name, []) for name in "rab"]
    log = CallLog(units)
    log.begin(root)
    for unit in blocks * 100:  # as a method that makes tokens
        log.begin(unit)
        log.end(unit)
    assert [*log.forward.values()] == units
    log.end(root)


class Unit(SimpleNamespace):
    __hash__ = object.__hash__

    def __init__(self):
        super().__init__(leases=set(), is_gathered=True)

    def reshard(self, for_backward):
        self.is_gathered = False


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3))))
def test_the_leases_of_a_unit_are_those_that_hold_it(moves):
    leases, units = [Lease() for _ in range(3)], [Unit() for _ in range(4)]
    held = set()
    for holds, lease, unit in moves:
        if holds:
            units[unit].is_gathered = True
            leases[lease].hold(units[unit])
            held.add((lease, unit))
        else:
            leases[lease].release((units[unit],))
            held.discard((lease, unit))
            assert units[unit].is_gathered == bool(units[unit].leases)
        for number, one in enumerate(units):
            assert one.leases == {leases[n] for n, m in held if m == number}
        for number, one in enumerate(leases):
            assert set(one.units) == {units[m] for n, m in held if n == number}
            assert bool(one.units) == any(n == number for n, _ in held)


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=4))
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


def test_the_four_hooks_of_a_unit_have_at_most_25_lines_each():
    for hook in (Passes.before_forward, Passes.after_forward, Passes.before_backward, Passes.after_backward):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(hook))).body
        assert ast.get_docstring(tree)
        assert tree.end_lineno - tree.body[0].end_lineno <= 25, hook
