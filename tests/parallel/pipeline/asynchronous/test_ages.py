"""Ages of weights, read from lists: the delays of the papers, and versions that are counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard import Pipeline
from zeroshard.config.pipeline import ASYNCHRONOUS
from zeroshard.config.pipeline import WEIGHTS as NAMES
from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule, parse_schedule
from zeroshard.parallel.pipeline.asynchronous.ages import WEIGHTS, Ages, count_live, kept_versions
from zeroshard.parallel.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    full_schedule_of,
    require_steps,
    steady,
)
from zeroshard.parallel.pipeline.simulate import ActionCosts, simulate

DEPTHS = st.integers(1, 6)
SIZES = st.integers(1, 40)
PER_STEP = st.integers(1, 9)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((2, 3), "0F0,0F1,0B0,STEP,0F2,0B1,STEP,0B2,STEP\n1F0,1B0,STEP,1F1,1B1,STEP,1F2,1B2,STEP\n"),
        # Two micro-batches a step; the last one takes those that are left.
        ((2, 5, 2), "0F0,0F1,0B0,0F2,0B1,STEP,0F3,0B2,0F4,0B3,STEP,0B4,STEP\n"
         "1F0,1B0,1F1,1B1,STEP,1F2,1B2,1F3,1B3,STEP,1F4,1B4,STEP\n"),
        # Two synchronous steps.
        ((2, 4, 1, 2), "0F0,0B0,STEP,0F1,0B1,STEP,0F2,0F3,0B2,STEP,0B3,STEP\n"
         "1F0,1B0,STEP,1F1,1B1,STEP,1F2,1B2,STEP,1F3,1B3,STEP\n"),
    ],
)  # fmt: skip
def test_the_list_of_a_steady_pipeline_drains_once(numbers: tuple[int, ...], text: str) -> None:
    assert str(steady(*numbers)) == text


@given(DEPTHS, SIZES, PER_STEP, st.integers(0, 5))
def test_a_steady_list_runs_and_every_gradient_is_applied(p: int, m: int, k: int, synchronous: int) -> None:
    schedule = steady(p, m, k, synchronous)
    simulate(schedule)
    require_steps(schedule)
    ages = Ages(schedule)
    steps = -(-min(synchronous * k, m) // k) + -(-max(0, m - synchronous * k) // k)
    for chunk in range(p):
        groups: dict[int, int] = {}
        for microbatch in range(m):
            groups[ages.applied[chunk, microbatch]] = groups.get(ages.applied[chunk, microbatch], 0) + 1
        assert list(groups) == list(range(steps))
        assert all(size <= k for size in groups.values())
        for microbatch in range(min(synchronous * k, m)):
            assert ages.crossed[Action(Kind.BACKWARD, chunk, microbatch)] == 0


@given(DEPTHS, SIZES)
def test_a_stage_has_p_minus_1_minus_s_steps_between_forward_and_backward(p: int, m: int) -> None:
    """Narayanan et al. 2019, "PipeDream", section 3.3: and p - s versions are live under stashing."""
    ages = Ages(steady(p, m))
    live = count_live(ages, WEIGHTS["stash"](ages))
    for s in range(p):
        assert ages.most_crossed(s) == ages.tau_forward(s) == min(p - 1 - s, m - 1)
        assert not any(ages.until_applied(Action(Kind.BACKWARD, s, microbatch)) for microbatch in range(m))
        assert live[s] <= p - s
        if m >= 2 * (p - s) - 1:  # a shorter list ends before its first versions are followed by others
            assert live[s] == p - s
        for microbatch in range(m):
            crossed = ages.crossed[Action(Kind.BACKWARD, s, microbatch)]
            assert crossed == min(p - 1 - s, microbatch)


@given(st.integers(2, 6), PER_STEP, st.integers(0, 5))
def test_full_lists_cross_as_many_steps_as_long_ones(p: int, k: int, synchronous: int) -> None:
    pipeline = Pipeline(
        schedule="pb", num_microbatches=1, microbatches_per_step=k, synchronous_steps=synchronous
    )
    full, long = Ages(full_schedule_of(pipeline, p)), Ages(steady(p, 9 * p, k))
    for s in range(p):
        assert full.most_crossed(s) == long.most_crossed(s) == -(-(p - 1 - s) // k)


@given(DEPTHS, SIZES, st.integers(1, 4))
def test_a_bound_of_crossed_steps_is_kept(p: int, m: int, bound: int) -> None:
    per_step = max(1, -(-(p - 1) // bound))
    ages = Ages(steady(p, m, per_step))
    assert max(map(ages.most_crossed, range(p))) <= bound


@given(DEPTHS, st.integers(1, 30), PER_STEP, st.sampled_from(sorted(WEIGHTS)))
def test_kept_versions_are_those_that_later_actions_use(p: int, m: int, k: int, name: str) -> None:
    """Against a walk over the list that looks at all later actions."""
    ages = Ages(steady(p, m, k))
    uses = WEIGHTS[name](ages)
    for rank, actions in enumerate(ages.schedule.lists):
        newest, found = 0, []
        for place, action in enumerate(actions):
            if action.kind is Kind.STEP:
                newest += 1
                later = [one for one in actions[place:] if one.is_compute]
                versions = {uses[one].version for one in later} - {None}
                found.append({version for version in versions if version < newest})
        assert [set(kept) for kept in kept_versions(ages, rank, rank, uses)] == found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_synchronous_schedule_has_one_version(name: str) -> None:
    schedule = build_schedule(name, 3, 6)
    lists = tuple((*own, Action(Kind.STEP, None, None)) for own in schedule.lists)
    ages = Ages(Schedule(schedule.placement, 6, lists))
    assert count_live(ages, WEIGHTS["stash"](ages)) == (1, 1, 1)
    assert set(ages.crossed.values()) == {0}


@given(st.integers(2, 6), st.integers(1, 30))
def test_there_is_no_bubble_but_at_both_ends(p: int, m: int) -> None:
    """A forward and a backward take 1 and 2: a list takes 3 for each micro-batch, and 3 (p - 1) once.

    Narayanan et al. 2019, "PipeDream", section 3.2. Steps take their own time alone.
    """
    assert simulate(steady(p, m), ActionCosts()).makespan == 3 * (m + p - 1)
    found = simulate(steady(p, m, p), ActionCosts(step=0.5)).makespan
    least = 3 * m + 0.5 * -(-m // p)
    assert least < found <= least + (p - 1) * 3.5


def test_the_names_of_a_config_are_those_of_the_table() -> None:
    assert set(NAMES) == WEIGHTS.keys()
    assert {method.weights for method in ASYNCHRONOUS.values()} <= WEIGHTS.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,1F0,1B0,0B0,STEP\n", "pipeline rank 0: expected one chunk in an asynchronous list, got 0, 1"),
        ("0F0,0B0\n", "pipeline rank 0: expected a STEP after the last backward of the list, got none"),
        ("0F0,STEP,0B0,STEP\n", "pipeline rank 0: expected a backward before each step, got none"),
        ("0F0,0I0,0W0,STEP\n", "expected F, B and STEP in an asynchronous list, got 0I0"),
        ("0UNSHARD,0F0,0B0,STEP\n", "expected F, B and STEP in an asynchronous list, got 0UNSHARD"),
    ],
)
def test_a_list_with_which_nobody_can_train_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_steps(parse_schedule(text))
