"""The directions along which weights are moved: the change that one step is taken to make; their arithmetic.

w   weights        g   gradient, weight decay included        v   momentum buffer, v = m v + g

The mean of changes and the last change are kept as states of the optimizer, one for each parameter. So
checkpoints, resharding and reports of memory know them without code of their own. The optimizer's own next
update is a direction, too; see `optim/asynchronous/`, which knows kinds of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.buffer import FlatBuffer


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


Corrected = Callable[[int, int], AbstractContextManager[None]]
"""(tau, step) -> a context for the optimizer's step: tau in steps, and the steps of training before it."""


class Change(Protocol):
    """The change of one step, of each parameter of the optimizer."""

    def move(self, parameter: ShardedParameter, weights: Tensor, ahead: int, out: Tensor) -> None:
        """Write a slice of the main parameters some steps ahead, weights + ahead * change.

        Args:
            parameter: the parameter.
            weights: its slice.
            ahead: the number of steps.
            out: like the slice, with memory of its own.
        """

    def noting(self, decay: float) -> AbstractContextManager[None]:
        """Note the change of the step inside; `decay` is that of a mean."""


class NotedChange:
    """The changes of the steps so far: their mean, or the last one.

    Args:
        optimizer: the optimizer, whose states they become.
        buffers: the trained buffers.
        name: the name of the state.
        is_mean: True for the mean.
    """

    def __init__(
        self, optimizer: Optimizer, buffers: Sequence[FlatBuffer], name: str, *, is_mean: bool
    ) -> None:
        self._optimizer, self._buffers = optimizer, buffers
        self._is_mean, self._name = is_mean, name

    def move(self, parameter: ShardedParameter, weights: Tensor, ahead: int, out: Tensor) -> None:
        """Write a slice some steps ahead; see `Change`."""
        change: Tensor | None = self._optimizer.state.get(parameter, {}).get(self._name)
        if change is None:
            out.copy_(weights)
        else:
            torch.add(weights, change.view_as(weights), alpha=ahead, out=out)

    @contextmanager
    @torch.no_grad()
    def noting(self, decay: float) -> Iterator[None]:
        """Note the change of the step inside."""
        before = [buffer.main.detach().clone() for buffer in self._buffers]
        yield
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for buffer, old in zip(self._buffers, before, strict=True):
            change = torch.sub(buffer.main.detach(), old, out=old)
            for index, parameter in enumerate(buffer.sharded):
                if id(parameter) in stepped:
                    self._note(parameter, change[buffer.sharded_span(index).slice], decay)

    def _note(self, parameter: ShardedParameter, change: Tensor, decay: float) -> None:
        # A state that is looked up is made, and an optimizer takes an empty one for that of a first step.
        if self._name in self._optimizer.state.get(parameter, {}):
            state = self._optimizer.state[parameter]
            if self._is_mean:
                mean_of_changes(state[self._name], change.view_as(state[self._name]), decay)
            else:
                state[self._name].copy_(change.view_as(state[self._name]))
        elif gradient_of(parameter) is not None:  # its first step
            first = change.clone() if not self._is_mean else change * (1.0 - decay)
            self._optimizer.state[parameter][self._name] = first


def moved(buffer: FlatBuffer, change: Change, ahead: int) -> Callable[[], Tensor]:
    """Return a call that computes the main parameters of a buffer some steps ahead: w + ahead * change."""

    @torch.no_grad()
    def compute() -> Tensor:
        values = buffer.main.detach().clone()
        write_moved(values, buffer, change, ahead)
        return values

    return compute


@torch.no_grad()
def write_moved(target: Tensor, buffer: FlatBuffer, change: Change, ahead: int) -> None:
    """Write the main parameters of a buffer some steps ahead, w + ahead * change.

    Args:
        target: like the main parameters, perhaps in another dtype.
        buffer: the buffer.
        change: the change of a step.
        ahead: the number of steps.
    """
    main = buffer.main.detach()
    if not ahead:
        target.copy_(main)
    elif target.dtype != main.dtype:
        target.copy_(moved(buffer, change, ahead)())
    else:
        for index, parameter in enumerate(buffer.sharded):
            span = buffer.sharded_span(index).slice
            if target[span].numel():
                change.move(parameter, main[span], ahead, target[span])
