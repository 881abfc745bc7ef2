"""The parts of asynchronous pipelines that know kinds of optimizers: the next update, and corrected steps.

The next update of an optimizer is read from its momentum: the change that a step is taken to make.

    SGD         -lr v                                        v: the momentum buffer, [n], like a slice
    Adam(W)     -lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps),     and -lr * decay * w of AdamW

For SGD this is the prediction of SpecTrain (Chen et al. 2018, section 3.2) and of linear weight prediction
(Kosson et al. 2021, "Pipelined Backpropagation at Scale", section 3.3). Adam's is its own update, with the
moments of the last step, as no new gradient is known: the same idea for another rule.

Steps are corrected for stale gradients around the optimizer's own step.
`parallel/pipeline/asynchronous/method.py` has the formulas.

    rescale    lr / tau^(1 - min(step / K, 1))          any optimizer (PipeMare, technique 1)
    spike      w -= lr (a v + b g)                      SGD with momentum (Kosson et al. 2021, section 3.2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from zeroshard.config.pipeline import MOVED_WEIGHTS, NOTED_CHANGES
from zeroshard.optim.ranges import RANGES, Range, Ranges, check_ranges
from zeroshard.parallel.pipeline.asynchronous.method import (
    AsynchronousMethod,
    Change,
    Corrected,
    NotedChange,
    compensate,
    lr_factor,
)
from zeroshard.parallel.pipeline.part import ModelPart
from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.sharding.runtime import Runtime

Update = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any], int, Tensor], None]
"""(weights, group, state, ahead, out): write weights + ahead * change into `out`, which is like the weights.

Before the first step the change is zero. This runs before most actions, so it allocates nothing of the size
of the weights where the states have their dtype.
"""


def update_of(optimizer: Optimizer, asked: str) -> Update:
    """Return the function that moves weights along the next update of an optimizer.

    Args:
        optimizer: the optimizer.
        asked: the config key with its value, for errors.

    Raises:
        ValueError: the optimizer is none of those above, or has no momentum.
    """
    if type(optimizer) is SGD:
        _require(optimizer, asked, _SGD_MOVES)
        move: Update = _sgd
    elif type(optimizer) in (Adam, AdamW):
        _require(optimizer, asked, {"maximize": _OFF})
        move = _adam
    else:
        raise ValueError(
            f"{asked} moves weights along the next update of the optimizer: expected torch's SGD with "
            f"momentum, Adam or AdamW, got {type(optimizer).__name__}. 'estimate' and 'lwp-weights' work "
            "with every optimizer"
        )

    def update(weights: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], *to: Any) -> None:
        if state.get("momentum_buffer", state.get("exp_avg")) is None:
            to[-1].copy_(weights)
        else:
            move(weights, group, state, *to)

    return update


_OFF: Range = (lambda x: not x, "False")
_SGD_MOVES: Ranges = {"nesterov": _OFF, "maximize": _OFF, "momentum": (lambda x: x > 0, "a number above 0")}


def _require(optimizer: Optimizer, asked: str, ranges: Ranges) -> None:
    """Raise ValueError for hyperparameters that a method cannot work with."""
    for group in optimizer.param_groups:
        check_ranges(group, ranges, f"{asked} with {type(optimizer).__name__}: ")


def _sgd(
    weights: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], ahead: int, out: Tensor
) -> None:
    velocity = state["momentum_buffer"].view_as(weights)
    torch.add(weights, velocity, alpha=-ahead * float(group["lr"]), out=out)


def _adam(
    weights: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], ahead: int, out: Tensor
) -> None:
    first, second = (state[key].view_as(weights) for key in ("exp_avg", "exp_avg_sq"))
    if group.get("amsgrad"):
        second = state["max_exp_avg_sq"].view_as(weights)
    (beta1, beta2), rate, step = group["betas"], ahead * float(group["lr"]), float(state["step"])
    root = torch.sqrt(second, out=out if out.dtype == second.dtype else None)
    root.div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    torch.addcdiv(weights, first, root, value=-rate / (1 - beta1**step), out=out)
    if group.get("decoupled_weight_decay"):
        out.sub_(weights, alpha=rate * group["weight_decay"])


def rescaled(optimizer: Optimizer, anneal_steps: int | None) -> Corrected:
    """Return steps with a learning rate that is divided by their delay.

    Raises:
        ValueError: a group has no learning rate.
    """
    asked = "pipeline.correction='rescale'"
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(f"{asked}: expected lr in each parameter group of {type(optimizer).__name__}")

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
    # With a momentum of 1 the sum of its powers, b, would have no limit.
    ranges = {**_SGD_MOVES, "dampening": _OFF, "momentum": RANGES["momentum"]}
    _require(optimizer, "pipeline.correction='spike'", ranges)

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
    for parameter in group["params"]:
        gradient = gradient_of(parameter)
        if gradient is None or not gradient.numel():
            continue
        weights = parameter.detach()
        gradient.add_(weights, alpha=group["weight_decay"])
        before: Tensor | None = optimizer.state.get(parameter, {}).get("momentum_buffer")
        velocity = gradient if before is None else gradient.add(before, alpha=group["momentum"])
        compensate(weights, velocity, gradient, float(group["lr"]), group["momentum"], tau)


class UpdateChange:
    """The next update of the optimizer; see the head of this file.

    Args:
        optimizer: the optimizer.
        asked: the config key with its value, for errors.

    Raises:
        ValueError: see `update_of`.
    """

    def __init__(self, optimizer: Optimizer, asked: str) -> None:
        self._optimizer, self._asked = optimizer, asked
        self._places: dict[int, int] = {}
        """The place of the group of each parameter: a load puts other groups into the same places."""
        self._read_groups()

    def move(self, parameter: ShardedParameter, weights: Tensor, ahead: int, out: Tensor) -> None:
        """Write a slice some steps ahead; see `Change`."""
        groups = self._optimizer.param_groups
        is_known = id(parameter) in self._places
        if not is_known and sum(len(group["params"]) for group in groups) != len(self._places):
            self._read_groups()  # after a later add_param_group
        if (place := self._places.get(id(parameter))) is None:
            out.copy_(weights)
        else:
            self._update(weights, groups[place], self._optimizer.state.get(parameter, {}), ahead, out)

    def _read_groups(self) -> None:
        groups = self._optimizer.param_groups
        self._update = update_of(self._optimizer, self._asked)
        self._places = {id(p): number for number, group in enumerate(groups) for p in group["params"]}


def method_of(part: ModelPart, runtime: Runtime, optimizer: Optimizer | None) -> AsynchronousMethod | None:
    """Return the method of an asynchronous pipeline, for its optimizer; None for a synchronous pipeline.

    Args:
        part: the part of this rank.
        runtime: the runtime of its units.
        optimizer: the optimizer of this rank; None if all of its parameters are frozen.

    Raises:
        ValueError: the method does not go with the optimizer; see `update_of`, `rescaled` and
            `spike_compensated`. Or with the lists; see `AsynchronousMethod`.
    """
    pipeline = part.cut.pipeline
    if not pipeline.is_asynchronous:
        return None
    change: Change | None = None
    corrected: Corrected | None = None
    if optimizer is not None:
        weights = pipeline.chosen_weights
        if pipeline.chosen_correction == "rescale":
            corrected = rescaled(optimizer, pipeline.anneal_steps)
        elif pipeline.chosen_correction == "spike":
            corrected = spike_compensated(optimizer)
        if (name := NOTED_CHANGES.get(weights)) is not None:
            trained = [buffer for buffer in runtime.buffers if buffer.trainable]
            decay = pipeline.decay if weights == "estimate" else 0.0
            change = NotedChange(optimizer, trained, name, decay)
        elif weights in MOVED_WEIGHTS:
            change = UpdateChange(optimizer, f"pipeline.weights={weights!r}")
    return AsynchronousMethod(runtime, part, change, corrected)
