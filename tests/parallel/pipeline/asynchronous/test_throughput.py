"""An asynchronous pipeline is never empty between its steps: no rank waits but for what its list needs.

Lists are simulated: they have no idle time. Then blocks sleep on real ranks, which are more than the cores,
and each start is compared with the ends of the actions that it needs. Other load makes actions longer, so
that ranks wait for each other; no bound is on the sum of such waits.
"""

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import zeroshard
from zeroshard.parallel.pipeline.actions import Kind, needed_actions
from zeroshard.parallel.pipeline.schedules import one_f_one_b, steady
from zeroshard.parallel.pipeline.simulate import ActionCosts, ActionTime, simulate

BENCHMARKS = str(Path(__file__).parents[4] / "benchmarks")
BLOCK_S = 0.02
"""Of a forward, and of each half of a backward."""


def after_start(timeline):
    """For each rank, the idle time from its first backward up to its last forward."""
    for spans in timeline:
        backward = next(index for index, span in enumerate(spans) if span.action.kind is Kind.BACKWARD)
        last = max(index for index, span in enumerate(spans) if span.action.kind is Kind.FORWARD)
        steady_part = spans[backward : last + 1]
        yield sum(later.start - one.end for one, later in pairwise(steady_part))


@pytest.mark.parametrize("per_step", [1, 3, None])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_list_has_no_idle_time_after_its_start(num_ranks, per_step):
    num = 6 * num_ranks
    schedule = steady(num_ranks, num, per_step or num_ranks)
    found = simulate(schedule)
    assert list(after_start(found.spans)) == [0.0] * num_ranks
    # Full at all times but the ends: Narayanan et al. 2019, "PipeDream", section 3.2.
    assert found.makespan == (num + num_ranks - 1) * 3.0
    flushed = num / num_ranks * simulate(one_f_one_b(num_ranks, num_ranks)).makespan
    assert flushed == num / num_ranks * (2 * num_ranks - 1) * 3.0


def test_steps_take_their_own_time_alone():
    for num_ranks in (2, 4):
        num = 8 * num_ranks
        costs = ActionCosts(step=0.5)
        found = simulate(steady(num_ranks, num, num_ranks), costs).makespan
        least = num * 3.0 + num / num_ranks * costs.step
        assert least < found <= least + (num_ranks - 1) * (3.0 + costs.step)


class Events:
    """The starts and ends of the actions of this rank; starts are behind the waits for messages."""

    def __init__(self, pipeline):
        self.found = []
        self._pipeline = pipeline
        for name in ("forward", "backward", "act"):
            setattr(pipeline, name, self._noted(getattr(pipeline, name)))

    def _noted(self, call):
        def noted(*args):
            start = time.monotonic()  # the same clock in all processes
            result = call(*args)
            self.found.append((self._pipeline._action, start, time.monotonic()))
            return result

        return noted


def run_sleepers(num, num_ranks, schedule, per_step):
    sys.path.append(BENCHMARKS)
    from pipeline_engines import adamw
    from pipeline_jobs import Sleepers

    job = Sleepers(BLOCK_S, num_ranks, num)
    pipeline = {"schedule": schedule, "num_microbatches": num, "balance": "memory"}
    pipeline["microbatches_per_step"] = per_step
    config = {"stage": 0, "mesh": {"pp": num_ranks}, "pipeline": pipeline}
    engine = zeroshard.initialize(job.model(), adamw, config, loss_fn=job.loss).engine
    events = Events(engine._pipeline)
    engine.train_batch(*job.batch(0))  # its messages tell their shapes
    events.found.clear()
    engine.train_batch(*job.batch(1))
    steps = engine.global_step
    engine.close()
    return [ActionTime(*event) for event in events.found], steps


@pytest.mark.long_where(schedule=["2bw"])
@pytest.mark.parametrize(
    ("num_ranks", "schedule", "per_step"),
    [(2, "pipedream", 1), (4, "2bw", 4), pytest.param(4, "pipemare", 1, marks=pytest.mark.long)],
)
def test_no_rank_idles_after_the_start(ranks, num_ranks, schedule, per_step):
    num = 6 * num_ranks
    timelines, steps = zip(*ranks(num_ranks, run_sleepers, num, num_ranks, schedule, per_step), strict=True)
    assert set(steps) == {2 * num // per_step}
    lists = steady(num_ranks, num, per_step)
    assert tuple(tuple(span.action for span in spans) for spans in timelines) == lists.lists

    # Each action begins when those that its list needs have ended: within less than the shortest action.
    ends = {span.action: span.end for spans in timelines for span in spans if span.action.is_compute}
    needed = needed_actions(lists)
    for spans in timelines:
        # Apart for actions behind a step, which are few: a wait that each step brings shows there alone.
        late: dict[bool, list[float]] = {}
        for before, span in pairwise(spans):
            if span.action.is_compute:
                others = (ends[action] for action in needed.get(span.action, ()))
                late.setdefault(before.action.is_compute, []).append(span.start - max([before.end, *others]))
        assert late.keys() == {True, False}
        assert max(map(statistics.median, late.values())) < BLOCK_S / 2
        # A step waits for no other rank: these weights of 16 kB take less than a millisecond.
        steps = [span.end - span.start for span in spans if not span.action.is_compute]
        assert statistics.median(steps) < BLOCK_S / 2
