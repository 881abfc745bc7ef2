"""Rotor's optimum for chains, against its known optima and a search over all sequences."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from zeroshard.forwards.keeping import Tree, UnitProfile, plan_chain

LOSS = UnitProfile(forward=0, backward=0, output=0, saved=0)
UNIT = UnitProfile(forward=1, backward=1, output=1, saved=1)


class Task(NamedTuple):
    """A task of a sequence.

    - forward: compute the output of the stage without autograd, and drop its input.
    - keep: compute the output without autograd, and keep the input.
    - save: compute the output with autograd, and keep the input.
    - backward: give the gradient of the input for the gradient of the output; drop what the stage has saved
      and, unless the stage before has saved it as its output, the input.
    """

    kind: str
    stage: int


def tasks_of(tree: Tree) -> Iterator[Task]:
    """The tasks that nested checkpoints of a tree carry out."""
    part, *rest = tree
    if isinstance(part, int):
        yield Task("save", part)
        if rest:
            yield from tasks_of(rest)
        yield Task("backward", part)
    else:
        first, *others = stages_of(part)
        yield Task("keep", first)
        yield from (Task("forward", stage) for stage in others)
        yield from tasks_of(rest)
        yield from tasks_of(part)


def stages_of(tree: Tree) -> list[int]:
    return [stage for part in tree for stage in ([part] if isinstance(part, int) else stages_of(part))]


Input = tuple[int, bool]
"""A stage, and True if its input stays until the backward of the stage."""
State = tuple[frozenset[Input], frozenset[int], int]
"""Inputs and saved stages on the device, and the stage whose backward comes next; its gradient is there."""


def tasks_from(state: State, num_stages: int) -> Iterator[tuple[Task, State]]:
    """The tasks that can run in a state, with the state after each."""
    inputs, saved, gradient = state
    if gradient in saved:
        left = frozenset(one for one in inputs if one[0] != gradient or one[0] == 0)
        yield Task("backward", gradient), (left, saved - {gradient}, gradient - 1)
    for stage in range(gradient + 1):
        own = [one for one in inputs if one[0] == stage]
        if stage in saved or not (own or stage - 1 in saved):
            continue
        others = inputs - set(own)
        kept = others if stage - 1 in saved else others | {(stage, True)}
        yield Task("save", stage), (kept, saved | {stage}, gradient)
        if stage < num_stages - 1:
            after = frozenset({(stage + 1, False)}) - {(stage + 1, True)}
            yield Task("keep", stage), (kept | after, saved, gradient)
            if own and not own[0][1]:
                yield Task("forward", stage), (others | after, saved, gradient)


def used(task: Task, before: State, after: State, stages: Sequence[UnitProfile], given: int) -> int:
    """Bytes on the device while a task runs."""
    sizes = [given, *(stage.output for stage in stages)]

    def rest(state: State) -> int:
        inputs, saved, _ = state
        return sum(sizes[stage] for stage, _ in inputs) + sum(stages[stage].saved for stage in saved)

    _, _, gradient = before
    if task.kind == "backward":
        return rest(before) + sizes[gradient + 1]
    dropped = sizes[task.stage] if task.kind == "forward" else 0  # only after it has been read
    return rest(after) + dropped + sizes[gradient + 1]


def seconds(task: Task, stages: Sequence[UnitProfile]) -> float:
    stage = stages[task.stage]
    return stage.backward if task.kind == "backward" else stage.forward


def first_state(num_stages: int) -> State:
    return frozenset({(0, True)}), frozenset(), num_stages - 1


def replay(tasks: Sequence[Task], stages: Sequence[UnitProfile], given: int) -> tuple[float, int]:
    """Seconds and peak of a sequence; each task must find what it needs."""
    state, total, peak = first_state(len(stages)), 0.0, 0
    for task in tasks:
        after = dict(tasks_from(state, len(stages)))[task]
        total, peak = total + seconds(task, stages), max(peak, used(task, state, after, stages, given))
        state = after
    assert state == (frozenset({(0, True)}), frozenset(), -1)
    return total, peak


def search(stages: Sequence[UnitProfile], given: int, budget: int) -> float | None:
    """The least seconds of all sequences within a budget: Dijkstra 1959, over the states of a chain."""
    queue, done, number = [(0.0, 0, first_state(len(stages)))], set[State](), 0
    while queue:
        total, _, state = heapq.heappop(queue)
        if state[2] < 0:
            return total
        if state in done:
            continue
        done.add(state)
        for task, after in tasks_from(state, len(stages)):
            if used(task, state, after, stages, given) <= budget:
                number += 1
                heapq.heappush(queue, (total + seconds(task, stages), number, after))
    return None


@pytest.mark.parametrize(
    ("length", "budgets", "optima"),
    [
        (8, range(4, 11), [43, 26, 22, 20, 19, 18, 16]),
        (10, range(4, 13), [64, 36, 29, 27, 25, 24, 23, 22, 20]),
        (16, (4, 18), [151, 32]),
    ],
)
def test_equal_stages_have_the_known_optima(length: int, budgets: Sequence[int], optima: list[int]) -> None:
    stages = [UNIT] * length + [LOSS]
    for budget, optimum in zip(budgets, optima, strict=True):
        total, peak = replay(list(tasks_of(plan_chain(stages, 1, budget))), stages, 1)
        assert total == optimum
        assert peak <= budget


def test_no_sequence_is_faster() -> None:
    rng, num_impossible = random.Random(19), 0
    for _ in range(20):
        stages = [
            UnitProfile(
                forward=rng.randint(1, 4),
                backward=rng.randint(1, 6),
                output=(output := rng.randint(1, 3)),
                saved=output + rng.randint(0, 4),
            )
            for _ in range(rng.randint(1, 4))
        ]
        stages.append(LOSS)
        given, budget = rng.randint(1, 3), rng.randint(5, 22)
        best = search(stages, given, budget)
        if best is None:
            num_impossible += 1
            assert plan_chain(stages, given, budget) is None
        else:
            total, peak = replay(list(tasks_of(plan_chain(stages, given, budget))), stages, given)
            assert total == best
            assert peak <= budget
    assert 1 < num_impossible < 20


def test_sizes_in_bytes_are_rounded_up_and_stay_within_the_budget() -> None:
    rng = random.Random(5)
    stages = [
        UnitProfile(
            forward=rng.random(), backward=2.0, output=rng.randint(60, 70) * 999_983, saved=1_100_000_007
        )
        for _ in range(24)
    ]
    stages.append(LOSS)
    times = []
    for budget in (2 * 10**9, 6 * 10**9, 30 * 10**9):
        total, peak = replay(list(tasks_of(plan_chain(stages, 65 * 10**6, budget))), stages, 65 * 10**6)
        assert 0.75 * budget < peak <= budget
        times.append(total)
    assert times[0] > times[1] > times[2] == pytest.approx(sum(s.forward + s.backward for s in stages))
