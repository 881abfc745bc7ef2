"""Ranges of hyperparameters and their checks; gradients of the layout that steps take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Range = tuple[Callable[[Any], bool], str]
"""A condition on a value, and the same in words, for the error."""
Ranges = Mapping[str, Range]
"""The ranges of hyperparameters by their names."""

RANGES: Ranges = {
    "min_8bit_size": (lambda x: isinstance(x, int) and x is not True and x >= 0, "an integer >= 0"),
    **dict.fromkeys(
        ("lr", "eps", "weight_decay", "alpha"), (lambda x: 0 <= x < math.inf, "a finite number >= 0")
    ),
    **dict.fromkeys(("t_alpha", "t_beta3"), (lambda x: x is None or x > 0, "a number above 0 or None")),
    "momentum": (lambda x: 0 < x < 1, "a number above 0 and below 1"),
}
"""The hyperparameters that have the same range in all rules."""


def betas_range(num: int) -> Range:
    """The range of `betas` that are `num` numbers."""
    return (
        lambda betas: len(betas) == num and all(0 <= beta < 1 for beta in betas),
        f"{num} numbers from 0 to below 1",
    )


def check_ranges(group: Mapping[str, Any], ranges: Ranges) -> None:
    """Raise ValueError for the first hyperparameter out of its range; a group may lack some."""
    for key, (is_in_range, expected) in ranges.items():
        if key in group and not _holds(is_in_range, group[key]):
            raise ValueError(f"{key}: expected {expected}, got {group[key]!r}")


def _holds(condition: Callable[[Any], bool], value: Any) -> bool:
    try:
        return bool(condition(value))
    except TypeError:  # no number
        return False


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


def called(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a closure, which is called with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def dense(grad: Tensor) -> Tensor:
    """Return a gradient that is no sparse tensor.

    Raises:
        RuntimeError: it is one.
    """
    if grad.layout is not torch.strided:
        raise RuntimeError(f"expected a dense gradient, got one of layout {grad.layout}")
    return grad
