"""The arithmetic of asynchronous methods, on tensors of any shape: nothing here knows ranks or schedules.

w   weights        g   gradient, weight decay included        v   momentum buffer, v = m v + g
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


def lr_factor(tau: float, step: int, anneal_steps: int | None) -> float:
    """Return the factor of the learning rate for stale gradients: 1 / tau^(1 - min(step / K, 1)).

    Args:
        tau: steps from a forward to the step with its gradient. Up to 1 the factor is 1.
        step: the steps before this one.
        anneal_steps: K, the steps after which the factor is 1 everywhere. None: it never changes.

    Source: Yang et al. 2021, "PipeMare: Asynchronous Pipeline Parallel DNN Training", technique 1.
    """
    power = 1.0 if anneal_steps is None else 1.0 - min(step / anneal_steps, 1.0)
    return float(max(tau, 1.0) ** -power)


def decay_of_changes(decay: float, crossed: int) -> float:
    """Return the decay of the mean of changes, D^(1 / (tau_forward - tau_backward)); 0 if none is crossed.

    Args:
        decay: D, from 0 to 1.
        crossed: tau_forward - tau_backward, in steps.

    Source: as `lr_factor`, technique 2.
    """
    return float(decay ** (1.0 / crossed)) if crossed else 0.0


def mean_of_changes(mean: Tensor, change: Tensor, decay: float) -> Tensor:
    """Return the mean of changes after one more: decay * mean + (1 - decay) * change, in place."""
    return mean.lerp_(change, 1.0 - decay)


class Spike(NamedTuple):
    """The factors of spike compensation: w -= lr * (a v + b g)."""

    a: float
    """The factor of the momentum, m^D."""
    b: float
    """The factor of the gradient, (1 - m^D) / (1 - m)."""

    @staticmethod
    def of(momentum: float, delay: float) -> Spike:
        """Return the factors for a momentum m below 1, and a delay of D steps.

        Source: Kosson et al. 2021, "Pipelined Backpropagation at Scale", section 3.2, equation 12.
        """
        power = momentum**delay
        return Spike(power, (1.0 - power) / (1.0 - momentum))


def compensate(weights: Tensor, velocity: Tensor, gradient: Tensor, lr: float, spike: Spike) -> Tensor:
    """Turn the step w - lr v, which was taken, into w - lr (a v + b g); in place."""
    return weights.add_(velocity, alpha=lr * (1.0 - spike.a)).sub_(gradient, alpha=lr * spike.b)
