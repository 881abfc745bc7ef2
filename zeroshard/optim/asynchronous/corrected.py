"""Steps of an optimizer that are corrected for stale gradients, around its own step.

    rescale    lr / tau^(1 - min(step / K, 1))          any optimizer (PipeMare, technique 1)
    spike      w -= lr (a v + b g)                      SGD with momentum (Kosson et al. 2021, section 3.2)

`directions.py` of `parallel/pipeline/asynchronous/` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from zeroshard.optim.asynchronous.updates import require_groups
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.parallel.pipeline.asynchronous.directions import Corrected, Spike, compensate, lr_factor
from zeroshard.parameters.gradient import gradient_of


def rescaled(optimizer: Optimizer, anneal_steps: int | None) -> Corrected:
    """Return steps with a learning rate that is divided by their delay.

    Raises:
        ValueError: a group has no learning rate, or parameters have some of their own.
    """
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(
            f"pipeline.correction='rescale': expected lr in each parameter group of "
            f"{type(optimizer).__name__}"
        )
    if isinstance(optimizer, BlockwiseOptimizer) and optimizer.overrides:
        raise ValueError(
            "pipeline.correction='rescale': expected an optimizer without overrides of single parameters"
        )

    @contextmanager
    def step(tau: int, number: int) -> Iterator[None]:
        factor = lr_factor(tau, number, anneal_steps)
        with _changed(optimizer, "lr", lambda lr: lr * factor):
            yield

    return step


def spike_compensated(optimizer: Optimizer) -> Corrected:
    """Return steps whose late gradients count as if they had come in time.

    Raises:
        ValueError: the optimizer is not torch's SGD with a momentum above 0 and below 1.
    """
    if type(optimizer) is not SGD:
        raise ValueError(
            "pipeline.correction='spike': expected torch.optim.SGD with momentum, whose update is the sum "
            f"that it compensates, got {type(optimizer).__name__}; 'rescale' works with every optimizer"
        )
    off = ("nesterov", "maximize", "dampening")
    require_groups(optimizer, "pipeline.correction='spike'", off=off, momentum=True)
    for group in optimizer.param_groups:
        if not group["momentum"] < 1:  # the sum of its powers, b, would have no limit
            raise ValueError(
                f"pipeline.correction='spike' with SGD: expected momentum < 1, got {group['momentum']}"
            )

    @contextmanager
    def step(tau: int, number: int) -> Iterator[None]:
        for group in optimizer.param_groups:
            _compensate_group(optimizer, group, tau)
        with _changed(optimizer, "weight_decay", lambda _: 0.0):  # it is in the gradients now
            yield

    return step


@contextmanager
def _changed(optimizer: Optimizer, key: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Change a hyperparameter of all parameter groups for the step inside."""
    before = [group[key] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group[key] = change(group[key])
    try:
        yield
    finally:
        for group, value in zip(optimizer.param_groups, before, strict=True):
            group[key] = value


@torch.no_grad()
def _compensate_group(optimizer: Optimizer, group: dict[str, Any], tau: int) -> None:
    """Make the correction before the step: it is added to the same weights."""
    spike = Spike.of(group["momentum"], tau)
    for parameter in group["params"]:
        gradient = gradient_of(parameter)
        if gradient is None or not gradient.numel():
            continue
        weights = parameter.detach()
        gradient.add_(weights, alpha=group["weight_decay"])
        before: Tensor | None = optimizer.state.get(parameter, {}).get("momentum_buffer")
        velocity = gradient if before is None else gradient.add(before, alpha=group["momentum"])
        compensate(weights, velocity, gradient, float(group["lr"]), spike)
