"""Optimizers whose states take one byte an element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zeroshard.optim.eightbit import rules, states
from zeroshard.optim.eightbit.base import BlockwiseOptimizer, Ranges, check_ranges
from zeroshard.optim.eightbit.rules import Numbers
from zeroshard.optim.eightbit.states import MIN_8BIT_SIZE
from zeroshard.optim.eightbit.step import take_step

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class ElementWise(BlockwiseOptimizer):
    """Takes each parameter through its rule by itself."""

    num_betas: ClassVar[int] = 2

    def __init__(self, params: Params, defaults: dict[str, Any], min_8bit_size: int) -> None:
        super().__init__(params, {"min_8bit_size": min_8bit_size, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own.

        Raises:
            ValueError: a hyperparameter is out of its range.
        """
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; what `closure` returns, called first with gradients on.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch._C.DisableTorchFunctionSubclass():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step(parameter, self.settings(parameter, group))
        return loss

    def _step(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None, "it is stepped because of it"
        if gradient.layout is not torch.strided or gradient.is_complex():
            raise RuntimeError(
                f"expected a dense, real gradient, got one of {gradient.dtype} and layout {gradient.layout}"
            )
        state = self.state[parameter]
        if not state:
            state.update(states.begin(self.rule, parameter, group["min_8bit_size"]))
        step, values = int(state["step"]) + 1, states.flat(parameter)
        take_step(
            self.rule,
            values,
            states.flat(gradient),
            states.read(self.rule, state),
            Numbers.of(group, step),
        )
        state["step"] = step
        if values.data_ptr() != parameter.data_ptr():
            parameter.copy_(values.view(parameter.shape))

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_ranges(group, {**RANGES, "betas": betas_range(self.num_betas)})


class AdamW8bit(ElementWise):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        params: parameters or parameter groups, float32.
        lr: learning rate, >= 0.
        betas: decay of the averages of gradients and of their squares, in [0, 1).
        eps: added to the denominator, >= 0.
        weight_decay: parameters shrink by lr * weight_decay a step, >= 0.
        min_8bit_size: elements of a whole parameter from which its states are quantized.

    Raises:
        ValueError: a number out of range.
    """

    rule = rules.ADAM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, min_8bit_size)


class Adam8bit(AdamW8bit):
    """Adam; weight decay is decoupled, as in bitsandbytes, and 0 unless asked for.

    Arguments as `AdamW8bit`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, min_8bit_size=min_8bit_size)


class Lion8bit(ElementWise):
    """Lion (Chen et al. 2023, program 1). Arguments as `AdamW8bit`."""

    rule = rules.LION

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, min_8bit_size)


class SGD8bit(ElementWise):
    """SGD with momentum, which must be above 0; weight decay is added to the gradient.

    Other arguments as `AdamW8bit`.
    """

    rule = rules.MOMENTUM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, min_8bit_size
        )


class AdEMAMix8bit(ElementWise):
    """AdEMAMix (Pagliardini et al. 2024, algorithm 1): Adam with a second, slow average of gradients.

    Args:
        betas: decay of the fast average, of the squares, and of the slow average.
        alpha: weight of the slow average.
        t_alpha, t_beta3: steps over which alpha and the slow average's decay grow to their values; None: at
            once.

    Other arguments as `AdamW8bit`.
    """

    rule = rules.ADEMAMIX
    num_betas = 3

    def __init__(  # noqa: PLR0913 (the hyperparameters of the paper)
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3}
        super().__init__(params, {**defaults, "eps": eps, "weight_decay": weight_decay}, min_8bit_size)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        beta1, _, beta3 = group["betas"]
        if group["t_beta3"] is not None and not (beta1 and beta3):
            raise ValueError(
                f"betas: expected the first and third above 0 with t_beta3, came {group['betas']!r}"
            )


RANGES: Ranges = {
    **dict.fromkeys(
        ("lr", "eps", "weight_decay", "alpha"), (lambda x: 0 <= x < math.inf, "a finite number >= 0")
    ),
    **dict.fromkeys(("t_alpha", "t_beta3"), (lambda x: x is None or x > 0, "a number above 0 or None")),
    "momentum": (lambda x: 0 < x < 1, "a number above 0 and below 1"),
}


def betas_range(num: int) -> tuple[Callable[[Any], bool], str]:
    """Of `betas`, which are so many."""
    return (
        lambda betas: len(betas) == num and all(0 <= beta < 1 for beta in betas),
        f"{num} numbers from 0 to below 1",
    )
