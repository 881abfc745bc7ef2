"""The arithmetic of corrections against formulas of the papers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.parallel.pipeline.asynchronous.method import (
    compensate,
    decay_of_changes,
    lr_factor,
    mean_of_changes,
)


def test_the_learning_rate_is_divided_by_the_delay_and_comes_back() -> None:
    """Yang et al. 2021, "PipeMare", technique 1: lr / tau^(1 - min(k / K, 1))."""
    assert lr_factor(4, 0, 10) == 0.25
    assert lr_factor(4, 5, 10) == 0.5
    assert lr_factor(4, 10, 10) == lr_factor(4, 99, 10) == 1.0
    assert lr_factor(4, 99, None) == 0.25
    assert lr_factor(0, 0, None) == lr_factor(1, 0, 10) == 1.0


def test_over_the_steps_that_are_crossed_the_mean_decays_by_d() -> None:
    for crossed in (1, 2, 7):
        assert decay_of_changes(0.135, crossed) ** crossed == pytest.approx(0.135)
    assert decay_of_changes(0.135, 0) == 0.0


def test_a_steady_change_is_its_own_mean() -> None:
    mean = torch.zeros(1, dtype=torch.float64)
    for _ in range(200):
        mean_of_changes(mean, torch.tensor([3.0], dtype=torch.float64), 0.8)
    assert mean.item() == pytest.approx(3.0, abs=1e-12)


@given(st.floats(0, 0.99), st.integers(0, 6), st.integers(1, 40))
def test_spike_compensation_is_undelayed_descent_without_the_gradients_to_come(
    momentum: float, delay: int, num_steps: int
) -> None:
    """For fixed gradients: Kosson et al. 2021, "Pipelined Backpropagation at Scale", section 3.2.

    The gradients of steps 0 to n - 1 arrive `delay` steps late. Undelayed momentum SGD over n steps, in which
    the last `delay` gradients are zero, gives the same weights.
    """
    generator = torch.Generator().manual_seed(num_steps)
    gradients = torch.randn(num_steps, dtype=torch.float64, generator=generator)
    lr = 0.1
    weights, velocity = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for step in range(num_steps):
        arrived = gradients[step - delay] if step >= delay else torch.zeros((), dtype=torch.float64)
        velocity = momentum * velocity + arrived
        weights = weights - lr * velocity
        compensate(weights, velocity, arrived, lr, momentum, delay)
    undelayed, v = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for step in range(num_steps):
        v = momentum * v + (gradients[step] if step < num_steps - delay else 0.0)
        undelayed = undelayed - lr * v
    assert weights.item() == pytest.approx(undelayed.item(), abs=1e-10)


def test_without_a_delay_there_is_nothing_to_compensate() -> None:
    weights, velocity, gradient = torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 5.0)
    assert torch.equal(compensate(weights, velocity, gradient, 0.1, 0.9, 0), torch.ones(3))
