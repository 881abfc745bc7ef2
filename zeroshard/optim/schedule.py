"""Learning rates for large batches: scaled with the batch.

torch's LinearLR(optimizer, start_factor=1 / k, total_iters=n) reaches one gradually, from the rate of a batch
that is k times as small (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

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
