"""LAMB and LARS with 8-bit states: trust ratios are those of updates before they are quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroshard.optim.eightbit import states
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.eightbit.rule import SIGNED, UNSIGNED, Rule, Scalars, Tensors, root
from zeroshard.optim.eightbit.states import MIN_8BIT_SIZE
from zeroshard.optim.layerwise import LAMB, LARS, LayerWise, Part


class TrustRatio8bit(BlockwiseOptimizer, LayerWise):
    """Norms are of all parameters of a group together, so all but the threshold is the same for a group."""

    @property
    def _overridable(self) -> tuple[str, ...]:
        return ("min_8bit_size",)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a hyperparameter that is out of its range."""
        super(BlockwiseOptimizer, self).check_group(group)  # of LAMB or LARS
        super().check_group(group)

    def _set_threshold(self, min_8bit_size: int) -> None:
        self.defaults["min_8bit_size"] = min_8bit_size
        for group in self.param_groups:
            group.setdefault("min_8bit_size", min_8bit_size)
            self.check_group(group)


def _lamb(p: Tensor, g: Tensor, states: Tensors, scalars: Scalars) -> tuple[Tensor, Tensors]:
    """The update before the trust ratio: You et al. 2020, "Large Batch Optimization", algorithm 2."""
    beta1, rest1, beta2, rest2, correction1, correction2, eps, weight_decay = scalars
    m, v = states
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * g) * rest2
    return (m * correction1) / (root(v) * correction2 + eps) + p * weight_decay, (m, v)


LAMB_RULE = Rule(
    optimizers=("LAMB",),
    states={"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED},
    scalars=lambda n: (*n.rates, n.correction1, n.correction2, n.eps, n.weight_decay),
    update=_lamb,
    gives_update=True,
)


class LAMB8bit(TrustRatio8bit, LAMB):
    """LAMB whose two moments take a byte an element; the update comes from them before they are quantized.

    Arguments as `LAMB`, and:
        min_8bit_size: elements of a whole parameter from which its states are quantized.
    """

    rule = LAMB_RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        trust_ratio: bool = True,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        LAMB.__init__(self, params, lr, betas, eps, weight_decay, trust_ratio=trust_ratio)
        self._set_threshold(min_8bit_size)

    def _measure(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        updates = [
            grad.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for grad in grads
        ]
        for parameter, update in zip(parameters, updates, strict=True):
            self._step_by_rule(parameter, update.view(-1), self.settings(parameter, group))
        return updates


def _lars(p: Tensor, g: Tensor, states: Tensors, scalars: Scalars) -> tuple[Tensor, Tensors]:
    """You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1."""
    momentum, weight_decay, step_size = scalars
    (m,) = states
    m = m * momentum + (p * weight_decay + g) * step_size
    return p - m, (m,)


LARS_RULE = Rule(
    optimizers=("LARS",),
    states={"momentum_buffer": SIGNED},
    scalars=lambda n: (n.betas[0], n.weight_decay, n.lr),
    update=_lars,
    beta="momentum",
    without_step=(LARS,),
)


class LARS8bit(TrustRatio8bit, LARS):
    """LARS whose momentum takes a byte an element. Arguments as `LARS`, and as `LAMB8bit` has it."""

    rule = LARS_RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        trust_ratio: bool = True,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        LARS.__init__(self, params, lr, momentum, weight_decay, trust_coefficient, trust_ratio=trust_ratio)
        self._set_threshold(min_8bit_size)

    def _apply(self, part: Part) -> None:
        group, parameters = part.group, part.parameters
        ratios = torch.stack(part.trust).tolist() if part.trust else [1.0] * len(parameters)
        for parameter, grad, ratio in zip(parameters, part.measured, ratios, strict=True):
            settings = {**self.settings(parameter, group), "lr": group["lr"] * ratio}
            self._step_by_rule(parameter, states.flat(grad), settings)
