"""Every asynchronous method equals a single process that keeps the history of each stage's weights."""

import functools

import pytest

from tests.parallel.pipeline.asynchronous.runs import METHODS, compare, expected, method_of, run

expected = functools.lru_cache(expected)

OTHERS = sorted(METHODS.keys() - {"pipedream", "lwp, spike"})
"""Methods that a few ranks test as well; the fast selection runs them at 2 ranks."""


@pytest.mark.long_where(name=["pipemare, adamw", "pipedream, 2 per step", "lwp, adamw", "spectrain, adam"])
@pytest.mark.long_where(stage=[1, 2])
@pytest.mark.long_where(stage=[0], num_ranks=[4])
@pytest.mark.long_where(stage=[0], name=[*OTHERS, "lwp, spike"])
@pytest.mark.long_where(num_ranks=[3])
@pytest.mark.long_where(num_ranks=[4], num_stages=[2])
@pytest.mark.long_where(num_ranks=[4], name=OTHERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 2), (3, 3), (4, 4), (4, 2)])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_equals_the_history_of_weights(ranks, name, num_ranks, num_stages, stage):
    """Losses and parameters after 30 micro-batches."""
    pipeline, method, maker = method_of(name, num_stages)
    found = ranks(num_ranks, run, pipeline, maker, num_stages, (0,), 30, stage=stage)
    compare(found, expected(num_stages, method, maker))
