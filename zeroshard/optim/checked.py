"""Hyperparameters in their ranges, and gradients of the layout that steps take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor


def check_number(name: str, value: object, below: float = math.inf) -> None:
    """Raise ValueError unless a hyperparameter is a finite number of at least 0, and below a limit."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        limit = "a finite number >= 0" if below == math.inf else f"a number in [0, {below:g})"
        raise ValueError(f"{name}: expected {limit}, got {value!r}")


def check_betas(betas: object) -> None:
    """Raise ValueError unless they are two numbers in [0, 1)."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers, got {betas!r}")
    for number, beta in enumerate(betas):
        check_number(f"betas[{number}]", beta, below=1.0)


def dense(grad: Tensor) -> Tensor:
    """Return a gradient that is no sparse tensor.

    Raises:
        RuntimeError: it is one.
    """
    if grad.layout is not torch.strided:
        raise RuntimeError(f"expected a dense gradient, got one of layout {grad.layout}")
    return grad
