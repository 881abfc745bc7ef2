"""Plans of what units keep between forward and backward, against all combinations and a walk of the bytes."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest

from zeroshard.forwards.keeping import KeepingPlan, Link, Option, choose_keeping, simulate

Unit = tuple[Option, ...]
"""The options of a unit."""


def unit(forward: int, backward: int, saved: int, given: int, working: int, gather: int = 0) -> Unit:
    """A unit with four options, from the bytes that it saves and those of its input."""
    own = {"forward": forward, "backward": backward}
    again = {**own, "working": working + given, "again": forward + gather}
    return (
        Option(name="keep", held=saved, working=working, **own),
        Option(name="recompute", held=given, **again),
        Option(name="offload", moved=saved, working=working, **own),
        Option(name="recompute, offload its input", moved=given, **again),
    )


def draw(rng: random.Random, num_units: int) -> tuple[list[Unit], int, Link]:
    """Units, a budget and a link; all numbers are integers, so that a plan is exact."""
    units = []
    for _ in range(num_units):
        saved, given = rng.randint(1, 9), rng.randint(0, 3)
        forward, backward = rng.randint(1, 4), rng.randint(1, 8)
        units.append(unit(forward, backward, saved, given, saved + rng.randint(0, 5), rng.choice((0, 0, 2))))
    most = sum(one[0].held for one in units) + 6
    return units, rng.randint(5, most), Link(to_host=rng.randint(1, 4), from_host=rng.randint(1, 4))


def all_combinations(units: list[Unit], budget: int, link: Link) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and peaks of all combinations of options, in the order of `itertools.product`."""
    places = np.indices([len(one) for one in units]).reshape(len(units), -1)
    held, waiting, peak, seconds = np.zeros((4, places.shape[1]))
    for one, chosen in zip(units, places, strict=True):
        rows = [(o.held, o.moved, o.working, o.forward, o.backward + o.again) for o in one]
        holds, moved, working, forward, backward = np.array(rows)[chosen].T
        beside = np.minimum(link.to_host * forward, link.from_host * backward)
        before = np.clip(held + waiting + working - budget, 0, waiting)
        waiting -= before
        peak = np.maximum(peak, held + waiting + working)
        seconds += before / link.to_host + before / link.from_host
        seconds += forward + backward
        waiting += moved - np.minimum(waiting, beside)
        held += holds
    return seconds, peak


def walk(plan: KeepingPlan, budget: int, link: Link) -> None:
    """Move the bytes of each unit over the link, first in first out, and check all that a plan promises."""
    on_device = [0.0] * len(plan.options)  # bytes that are to leave
    gone: list[list[tuple[int, float]]] = []  # beside each forward, by unit
    late: list[list[tuple[int, float]]] = []

    def leave(num_bytes: float) -> list[tuple[int, float]]:
        left = []
        for number, there in enumerate(on_device):
            part = min(there, num_bytes)
            on_device[number] -= part
            num_bytes -= part
            left.append((number, part))
        assert num_bytes < 1e-9, "bytes leave that are not there yet"
        return left

    def used(number: int) -> float:
        return sum(option.held for option in plan.options[:number]) + sum(on_device[:number])

    clock = 0.0
    for number, option in enumerate(plan.options):
        late.append(leave(plan.before[number]))
        clock += plan.before[number] / link.to_host
        assert used(number) + option.working <= budget + 1e-9
        gone.append(leave(plan.beside[number]))
        assert plan.beside[number] / link.to_host <= option.forward + 1e-9
        clock += option.forward
        on_device[number] = option.moved
    for number, option in reversed(list(enumerate(plan.options))):
        assert on_device[number] == pytest.approx(option.moved), "a backward begins before its bytes are back"
        on_device[number] = 0
        for source, part in gone[number]:
            on_device[source] += part
        assert used(number) + option.working <= budget + 1e-9
        assert plan.beside[number] / link.from_host <= option.backward + option.again + 1e-9
        clock += option.backward + option.again + plan.before[number] / link.from_host
        for source, part in late[number]:
            on_device[source] += part
        assert used(number) <= budget + 1e-9
    assert plan.seconds == pytest.approx(clock)
    assert plan.peak <= budget


def test_a_plan_is_the_fastest_of_all_combinations() -> None:
    rng, num_impossible = random.Random(43), 0
    for number in range(300):
        units, budget, link = draw(rng, 1 + number % 8 if number < 8 else rng.randint(1, 6))
        seconds, peaks = all_combinations(units, budget, link)
        possible = peaks <= budget
        num_impossible += not possible.any()
        plan = choose_keeping(units, budget, link)
        least = max(budget, peaks.min())  # a plan within less than all need is that within the least
        if least > budget:
            seconds, peaks = all_combinations(units, int(least), link)
        assert plan.seconds == pytest.approx(seconds[peaks <= least].min()), (number, budget)
        walk(plan, int(least), link)
    assert 30 < num_impossible < 150


def test_the_simulator_gives_each_combination_its_seconds_and_its_peak() -> None:
    rng = random.Random(7)
    for num_units in (1, 2, 3, 4) * 3:
        units, budget, link = draw(rng, num_units)
        seconds, peaks = all_combinations(units, budget, link)
        plans = [simulate(options, budget, link) for options in product(*units)]
        assert [plan.seconds for plan in plans] == pytest.approx(seconds)
        assert [plan.peak for plan in plans] == list(np.ceil(peaks))


def test_an_example_by_hand() -> None:
    # Four equal units; each saves 4 bytes, of which one leaves beside a forward, and its input has 1 byte.
    units, link = [unit(1, 2, 4, 1, 4)] * 4, Link(to_host=1.0, from_host=2.0)
    keep, recompute, offload, _ = units[0]
    # In front of F2 there are 4 bytes that wait, and 4 more are needed: one byte leaves first, in 1 s, and
    # comes back after B2, in 0.5 s. One more leaves beside F2: 2 + 4 + 4 bytes in front of F3, 3 too many.
    plan = simulate([offload, offload, keep, keep], 7, link)
    assert plan.before == [0, 1, 3, 2]
    assert plan.beside == [0, 1, 1, 0]
    assert plan.seconds == 12 + 6 * 1.5
    assert plan.peak == 8  # held by the third unit and needed by the fourth one: no waiting helps
    # In front of F4 there are 1 and 4 bytes that are held, and 4 - 1 - 1 that wait.
    plan = simulate([offload, recompute, keep, keep], 11, link)
    assert (plan.before, plan.beside) == ([0, 0, 0, 0], [0, 1, 1, 1])
    assert (plan.seconds, plan.peak) == (13, 11)
    assert choose_keeping(units, 16, link).options == [keep] * 4
    assert choose_keeping(units, 14, link).options == [offload, keep, keep, keep]
    assert choose_keeping(units, 14, link).seconds == 12
    assert choose_keeping(units, 13, link).seconds == 13  # one is recomputed: a byte takes 1.5 s


def test_with_room_for_all_nothing_is_moved() -> None:
    units = [unit(1, 2, 4, 1, 6)] * 20
    plan = choose_keeping(units, 20 * 4 + 2, Link(to_host=1e9, from_host=1e9))
    assert {option.name for option in plan.options} == {"keep"}
    assert (plan.seconds, plan.peak, sum(plan.before), sum(plan.beside)) == (60, 82, 0, 0)


def test_a_plan_of_many_units_uses_its_budget_and_is_faster_with_more() -> None:
    rng = random.Random(3)
    units = [
        unit(rng.randint(50, 70), rng.randint(90, 150), rng.randint(900, 1300), 70, 1500) for _ in range(96)
    ]
    link = Link(to_host=5.0, from_host=5.0)
    budgets = (12_000, 25_000, 50_000, 100_000)
    plans = [choose_keeping(units, budget, link) for budget in budgets]
    for plan, budget in zip(plans, budgets, strict=True):
        walk(plan, budget, link)
        assert plan.peak >= 0.97 * budget
    assert all(less.seconds > more.seconds for less, more in pairwise(plans))
    base = sum(one[0].seconds for one in units)
    assert plans[2].seconds < 1.1 * base  # at less than half of the bytes; recomputing all takes 1.33
