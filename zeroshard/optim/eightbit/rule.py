"""A rule declares a kind of 8-bit optimizer once; all else reads the declaration.

    states        their zeros, their codebooks, their names in checkpoints
    ranges        the checks of parameter groups
    update        the step: of tensors in step.py; kernels.py and kernels_gpu.py compile their kernels from it
    operator      bitsandbytes' optimizers that go on over slices
    optimizers    which optimizers may load each other's checkpoints, and with which hyperparameters

An optimizer is a class with a `rule`, derived from `ElementWise8bit`. CONTRIBUTING.md shows one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dis import get_instructions
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.optim.ranges import Ranges

SIGNED, UNSIGNED = True, False
"""States that can be negative, and states that cannot: each has a codebook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The hyperparameters of one step of a parameter, and numbers that follow from them."""

    settings: Mapping[str, Any]
    """All of them, by name."""
    lr: float
    weight_decay: float
    betas: tuple[float, ...]
    eps: float
    step: int
    """1 in the first step of a parameter."""

    @property
    def rates(self) -> tuple[float, ...]:
        """(beta1, 1 - beta1, beta2, 1 - beta2, ...)."""
        return tuple(rate for beta in self.betas for rate in (beta, 1 - beta))

    @property
    def decay(self) -> float:
        """The factor of a parameter under decoupled weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def correction1(self) -> float:
        """The factor that corrects the bias of the first moment."""
        return 1 / (1 - self.betas[0] ** self.step)

    @property
    def correction2(self) -> float:
        """The factor that corrects the bias of the second moment's root."""
        return float((1 - self.betas[1] ** self.step) ** -0.5)


Scalars = tuple[float, ...]
Tensors = tuple[Tensor, ...]
Update = Callable[[Tensor, Tensor, Tensors, Scalars], tuple[Tensor, Tensors]]
"""(parameter, gradient, states, scalars) -> (new parameter, new states), element by element.

It is run on [n] float32 tensors; numba compiles it for single numbers, Triton for blocks of them. It has only
+ - *, `quotient`, `root` and `sign` under these names: the / of Triton is not exact. Each operation is
rounded to float32 by itself, without fused multiply-add: all ways give the same bits.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """The states of an optimizer, and the change of an element of a parameter and of its states in a step.

    A rule is known to checkpoints and to bitsandbytes' optimizers once it is made.

    Raises:
        ValueError: more than three states, an update with /, or an optimizer that another rule has.
    """

    optimizers: tuple[str, ...]
    """Class names of the optimizers with these states, of any library, without Paged, 8bit or 32bit."""
    states: Mapping[str, bool]
    """Names of the states, as torch names them, each SIGNED or UNSIGNED."""
    scalars: Callable[[Numbers], Scalars]
    """The numbers that the update takes, computed once a step in float64."""
    update: Update
    gives_update: bool = False
    """True if `update` returns no new parameter but the update, whose norm a trust ratio needs."""
    ranges: Ranges = field(default_factory=dict)
    """The ranges of hyperparameters that are not in `RANGES`, or differ from them."""
    schedule: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None
    """(hyperparameters, step) -> hyperparameters of this step."""
    operator: str | None = None
    """The name that bitsandbytes' operators have for it; None: they have none, or take other steps."""
    beta: str | None = None
    """The hyperparameter that is the only one of bitsandbytes' `betas` with an effect."""
    neutral: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters that some of `optimizers` lack, each with the value that has no effect."""
    without_step: tuple[type[Optimizer], ...] = ()
    """The classes of `optimizers` that count no steps."""

    def __post_init__(self) -> None:
        if len(self.states) not in (1, 2, 3):  # the loops of kernels.py
            raise ValueError(f"states: expected 1 to 3, got {len(self.states)}")
        if any(step.argrepr in {"/", "/="} for step in get_instructions(self.update)):
            raise ValueError("update: expected quotient(a, b), which is exact on any device, got a / b")
        if taken := RULES.keys() & set(self.optimizers):
            raise ValueError(f"optimizers: expected those that have no rule yet, got {taken}")
        RULES.update(dict.fromkeys(self.optimizers, self))

    def numbers(self, settings: Mapping[str, Any], step: int) -> Numbers:
        """The numbers of a step.

        Args:
            settings: hyperparameters by name, as zeroshard's class or bitsandbytes' has them.
            step: 1 in the first step of a parameter.
        """
        if self.beta is not None and self.beta in settings and "betas" not in settings:
            settings = {**settings, "betas": (settings[self.beta],)}
        if self.schedule is not None:
            settings = self.schedule(settings, step)
        return Numbers(
            settings=settings,
            lr=float(settings["lr"]),
            weight_decay=float(settings.get("weight_decay", 0.0)),
            betas=tuple(settings.get("betas", ())),
            eps=float(settings.get("eps", 0.0)),
            step=step,
        )


RULES: dict[str, Rule] = {}
"""Every rule by each of its `optimizers`."""


def rules_by_operator() -> dict[str, Rule]:
    """The rules that bitsandbytes has too, by its names for them."""
    return {rule.operator: rule for rule in RULES.values() if rule.operator is not None}


def root(x: Tensor) -> Tensor:
    """Return the square root, of any shape, rounded exactly: torch's on CPUs may be off by the last bit."""
    if not x.is_cpu:
        return x.sqrt()
    with np.errstate(invalid="ignore"):  # nan goes on as nan
        return torch.from_numpy(np.sqrt(x.numpy()))


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b for each element, of one shape, rounded exactly."""
    return a / b


def sign(x: Tensor) -> Tensor:
    """Return -1, 0 or 1 for each element, of any shape; nan for nan, for which torch has 0."""
    return x.sign().where(x.isnan().logical_not_(), x)
