"""Every asynchronous method equals a single process that keeps the history of each stage's weights."""

import pytest

from tests.parallel.pipeline.asynchronous.runs import METHODS, compare, expected, method_of, runs


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "num_stages", "stage"), [(2, 2, 3), (4, 4, 0)])
def test_a_method_equals_the_history_of_weights(ranks, num_ranks, num_stages, stage):
    """Losses and parameters after 14 micro-batches; `test_drawn.py` draws other layouts."""
    methods = {name: method_of(name, num_stages) for name in METHODS}
    cases = [
        ((pipeline, maker, num_stages, (0,), 14), {"stage": stage}) for pipeline, _, maker in methods.values()
    ]
    of_methods = zip(*ranks(num_ranks, runs, *cases, timeout=200), strict=True)
    for (name, (_, method, maker)), found in zip(methods.items(), of_methods, strict=True):
        compare(found, expected(num_stages, method, maker, num=14), name)
