"""An asynchronous pipeline is never empty between its steps: no rank waits but for what its list needs.

Lists have no idle time (`test_ages.py`). Blocks sleep on real ranks, which are more than the cores,
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
from zeroshard.parallel.pipeline.actions import needed_actions
from zeroshard.parallel.pipeline.schedules import steady
from zeroshard.parallel.pipeline.simulate import ActionTime

BENCHMARKS = str(Path(__file__).parents[4] / "benchmarks")
BLOCK_S = 0.02
"""Of a forward, and of each half of a backward."""


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
@pytest.mark.parametrize(("num_ranks", "schedule", "per_step"), [(2, "pipedream", 1), (4, "2bw", 4)])
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
