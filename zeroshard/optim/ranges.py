"""Optimizers that check the ranges of hyperparameters; gradients of the layout that steps take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Range = tuple[Callable[[Any], bool], str]
"""A condition on a value, and the same in words, for the error."""
Ranges = Mapping[str, Range]
"""The ranges of hyperparameters by their names."""

FLAG: Range = (lambda x: isinstance(x, bool), "True or False")


def number_range(below: float = math.inf) -> Range:
    """The range of a number, or of a tensor of one, that is at least 0 and below a limit."""
    words = "a finite number >= 0" if below == math.inf else f"a number in [0, {below:g})"

    def holds(x: Any) -> bool:
        x = x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
        return type(x) is not bool and isinstance(x, Real) and 0 <= float(x) < below

    return holds, words


RANGES: Ranges = {
    "min_8bit_size": (lambda x: isinstance(x, int) and x is not True and x >= 0, "an integer >= 0"),
    **dict.fromkeys(("lr", "eps", "weight_decay", "alpha"), number_range()),
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


def check_ranges(group: Mapping[str, Any], ranges: Ranges, where: str = "") -> None:
    """Raise ValueError for the first hyperparameter out of its range; a group may lack some."""
    for key, (is_in_range, expected) in ranges.items():
        if key in group and not _holds(is_in_range, group[key]):
            raise ValueError(f"{where}{key}: expected {expected}, got {group[key]!r}")


def _holds(condition: Callable[[Any], bool], value: Any) -> bool:
    try:
        return bool(condition(value))
    except TypeError:  # no number
        return False


class ChecksRanges(Optimizer):
    """An optimizer whose groups have hyperparameters in their ranges."""

    ranges: ClassVar[Ranges] = {}
    """Of the hyperparameters of a group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own.

        Raises:
            ValueError: a hyperparameter is out of its range.
        """
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a hyperparameter that is out of its range."""
        check_ranges(group, self.ranges)


def called(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a closure, which is called with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def dense(grad: Tensor) -> Tensor:
    """Return a gradient that is no sparse tensor, and real.

    Raises:
        RuntimeError: it is not.
    """
    if grad.layout is not torch.strided or grad.is_complex():
        raise RuntimeError(
            f"expected a dense, real gradient, got one of {grad.dtype} and layout {grad.layout}"
        )
    return grad
