"""Learning rates for large batches: scaled with the batch, and reached gradually.

Both schedulers are torch's LinearLR with other ends, and multiply the learning rate that a group has. So they
go into a ChainedScheduler with others that do, and into a SequentialLR.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

Rule = Literal["linear", "sqrt"]

_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}


def scaled_lr(base_lr: float, batch_size: int, base_batch_size: int, rule: Rule = "linear") -> float:
    """The learning rate for a batch, given one that is good for another.

    Args:
        base_lr: for `base_batch_size`.
        batch_size: samples of a step, over all ranks and micro-batches.
        base_batch_size: likewise.
        rule: "linear", times k = batch_size / base_batch_size (Goyal et al. 2017, "Accurate, Large Minibatch
            SGD", section 2.1); or "sqrt", times the root of k (Krizhevsky 2014, "One weird trick for
            parallelizing convolutional neural networks"; Hoffer et al. 2017, "Train longer, generalize
            better").

    Raises:
        ValueError: a size that is not positive, or another rule.
    """
    for name, size in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        if not size > 0:
            raise ValueError(f"{name}: expected a number > 0, got {size!r}")
    if (factor := _RULES.get(rule)) is None:
        raise ValueError(f"rule: expected 'linear' or 'sqrt', got {rule!r}")
    return base_lr * factor(batch_size / base_batch_size)


class _Ramp(LinearLR):
    """The learning rate times a factor that goes from `first` to `last` in `num_steps` equal increments."""

    def __init__(self, optimizer: Optimizer, first: float, last: float, num_steps: int) -> None:
        self.start_factor, self.end_factor = first if num_steps else last, last
        self.total_iters = max(1, num_steps)
        LRScheduler.__init__(self, optimizer)  # LinearLR itself refuses an end above 1


class GradualWarmup(_Ramp):
    """Raise a small learning rate to the optimizer's own, in equal increments.

    Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2, where `start_factor` is 1 / k, the
    factor of the small batch.

    Args:
        optimizer: its learning rates are those that are reached.
        num_steps: after which they are; 0: at once.
        start_factor: in (0, 1], of the first step; None: 1 / (num_steps + 1), a rise from 0 that has no step
            with 0.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, optimizer: Optimizer, num_steps: int, start_factor: float | None = None) -> None:
        _check_num_steps("num_steps", num_steps)
        if start_factor is None:
            start_factor = 1 / (num_steps + 1)
        if not 0 < start_factor <= 1:
            raise ValueError(f"start_factor: expected a number in (0, 1], got {start_factor!r}")
        super().__init__(optimizer, start_factor, 1.0, num_steps)


class BatchScaledLR(_Ramp):
    """Raise the optimizer's learning rate, good for `base_batch_size`, to that for `batch_size`.

    Args:
        optimizer: its learning rates are those for `base_batch_size`.
        batch_size: as `scaled_lr` has it.
        base_batch_size: as `scaled_lr` has it.
        rule: as `scaled_lr` has it.
        num_warmup_steps: in which it gets there, in equal increments; 0: at once.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batch_size: int,
        base_batch_size: int,
        rule: Rule = "linear",
        num_warmup_steps: int = 0,
    ) -> None:
        _check_num_steps("num_warmup_steps", num_warmup_steps)
        super().__init__(optimizer, 1.0, scaled_lr(1.0, batch_size, base_batch_size, rule), num_warmup_steps)


def _check_num_steps(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: expected an integer >= 0, got {value!r}")
