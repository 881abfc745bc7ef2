"""Learning rates for large batches, against formulas and against torch's own schedulers."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR

from zeroshard.checkpoint.values import check_plain
from zeroshard.optim.schedule import BatchScaledLR, GradualWarmup, scaled_lr

RATES = (0.1, 3.0)


def two_groups():
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in RATES], lr=1.0)


def rates(make, num_steps):
    """[step][group]: learning rates of these steps."""
    optimizer = two_groups()
    return follow(optimizer, make(optimizer), num_steps)


def follow(optimizer, scheduler, num_steps):
    found = []
    for _ in range(num_steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The epoch parameter")  # SequentialLR's own use of it
            scheduler.step()
    return torch.tensor(found, dtype=torch.float64)


def expected(factors):
    return torch.tensor([[rate * factor for rate in RATES] for factor in factors], dtype=torch.float64)


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("sizes", "rule", "factor"),
    [((8192, 256), "linear", 32), ((8192, 256), "sqrt", math.sqrt(32)), ((64, 256), "sqrt", 0.5)],
)
def test_the_learning_rate_grows_with_the_batch_or_its_root(sizes, rule, factor):
    assert scaled_lr(0.1, *sizes, rule) == pytest.approx(0.1 * factor)
    same(rates(lambda optimizer: BatchScaledLR(optimizer, *sizes, rule), 4), expected([factor] * 4))


def test_the_warmup_of_goyal_goes_from_the_small_batchs_rate_to_k_times_it_by_equal_amounts():
    # section 2.2: "start from a learning rate of η and increment it by a constant amount at each iteration"
    want = [1.0, 2.75, 4.5, 6.25, 8.0, 8.0, 8.0]
    same(rates(lambda o: BatchScaledLR(o, 2048, 256, num_warmup_steps=4), 7), expected(want))
    want = [factor / 8 for factor in want]
    same(rates(lambda o: GradualWarmup(o, 4, start_factor=1 / 8), 7), expected(want))


def test_a_warmup_without_a_start_rises_from_zero_and_has_no_step_there():
    same(rates(lambda o: GradualWarmup(o, 4), 7), expected([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]))
    same(rates(lambda o: GradualWarmup(o, 0), 3), expected([1.0, 1.0, 1.0]))


def test_in_a_sequence_the_next_one_begins_at_the_full_rate():
    def sequence(optimizer):
        return SequentialLR(optimizer, [GradualWarmup(optimizer, 3), CosineAnnealingLR(optimizer, 8)], [3])

    want = [0.25, 0.5, 0.75, *((1 + math.cos(math.pi * step / 8)) / 2 for step in range(4))]
    same(rates(sequence, 7), expected(want))


@pytest.mark.parametrize(
    "make",
    [lambda o: GradualWarmup(o, 6), lambda o: BatchScaledLR(o, 64, 16, "sqrt", num_warmup_steps=5)],
)
def test_the_state_is_of_plain_values_and_goes_on_as_if_there_had_been_no_stop(make):
    want = rates(make, 9)
    first = two_groups()
    stopped = make(first)
    same(follow(first, stopped, 3), want[:3])
    check_plain(stopped.state_dict(), "state")
    second = two_groups()
    resumed = make(second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(stopped.state_dict())
    same(follow(second, resumed, 6), want[3:])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda o: scaled_lr(0.1, 0, 256), "batch_size: expected a number > 0, got 0"),
        (lambda o: scaled_lr(0.1, 256, -1), "base_batch_size: expected a number > 0, got -1"),
        (lambda o: scaled_lr(0.1, 8, 4, "cubic"), "rule: expected 'linear' or 'sqrt', got 'cubic'"),
        (lambda o: BatchScaledLR(o, 8, 4, "root"), "rule: expected 'linear' or 'sqrt', got 'root'"),
        (
            lambda o: BatchScaledLR(o, 8, 4, num_warmup_steps=-1),
            "num_warmup_steps: expected an integer >= 0, got -1",
        ),
        (lambda o: GradualWarmup(o, -1), "num_steps: expected an integer >= 0, got -1"),
        (lambda o: GradualWarmup(o, 2.5), "num_steps: expected an integer >= 0, got 2.5"),
        (lambda o: GradualWarmup(o, 3, 0.0), r"start_factor: expected a number in \(0, 1\], got 0.0"),
        (lambda o: GradualWarmup(o, 3, 1.5), r"start_factor: expected a number in \(0, 1\], got 1.5"),
    ],
)
def test_arguments_out_of_their_range_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make(two_groups())
