"""Learning rates for large batches, against formulas."""

import math

import pytest

from zeroshard.optim.schedule import scaled_lr


@pytest.mark.parametrize(
    ("sizes", "rule", "factor"),
    [((8192, 256), "linear", 32), ((8192, 256), "sqrt", math.sqrt(32)), ((64, 256), "sqrt", 0.5)],
)
def test_the_learning_rate_grows_with_the_batch_or_its_root(sizes, rule, factor):
    assert scaled_lr(0.1, *sizes, rule) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 256), "batch_size: expected a number > 0, got 0"),
        ((256, -1), "base_batch_size: expected a number > 0, got -1"),
        ((8, 4, "cubic"), "rule: expected 'linear' or 'sqrt', got 'cubic'"),
    ],
)
def test_arguments_out_of_their_range_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        scaled_lr(0.1, *arguments)
