"""LARS and LAMB: each parameter's step is as long as its own norm says.

A step has three phases:

    measure    of each slice by itself, the tensor whose norm counts along with the weights' norm
               (LARS: the gradient; LAMB: the update)
    norms      of whole parameters, for all groups together: one exchange where ranks hold slices
    apply      the trust ratios that follow from them, slice by slice
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroshard.comm import moves
from zeroshard.optim.ranges import FLAG, ChecksRanges, Ranges, betas_range, called, dense, number_range
from zeroshard.stepping.norms import Norms, whole_norms

Tensors = list[Tensor] | tuple[Tensor, ...]
"""The arguments of torch's for-each functions."""


@dataclass(slots=True)
class GroupStep:
    """The parameters of one group that have a gradient, on their way through a step."""

    group: dict[str, Any]
    parameters: list[Tensor]
    measured: Tensors
    trust: Tensors = ()
    """0-dim, float64: the trust ratio of each; empty where the group has none."""

    def scale(self, tensors: Tensors) -> None:
        """Multiply each by its trust ratio."""
        if self.trust:
            torch._foreach_mul_(tensors, self.trust)


class LayerWise(ChecksRanges):
    """The phases of a step; a subclass says what is measured and what is made of it."""

    norms_of: Norms = staticmethod(whole_norms)
    ranges: ClassVar[Ranges] = {"lr": number_range(), "weight_decay": number_range(), "trust_ratio": FLAG}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Raises:
            RuntimeError: a sparse gradient; a slice of a parameter whose other slices are not known.
        """
        loss = called(closure)
        parts = []
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                grads = [dense(p.grad) for p in parameters]
                parts.append(GroupStep(group, parameters, self._measure(group, parameters, grads)))
        self._set_trust([part for part in parts if part.group["trust_ratio"]])
        for part in parts:
            self._apply(part)
        return loss

    def _set_trust(self, parts: Sequence[GroupStep]) -> None:
        parameters = [p for part in parts for p in part.parameters]
        if not parameters:
            return
        measured = [tensor for part in parts for tensor in part.measured]
        weight_norms, norms = self.norms_of([*parameters, *parameters], [*parameters, *measured]).chunk(2)
        sizes = [len(part.parameters) for part in parts]
        for part, weight, other in zip(parts, weight_norms.split(sizes), norms.split(sizes), strict=True):
            ratio = self._trust_ratio(part.group, weight, other)
            trust = torch.where((weight > 0) & (other > 0), ratio, 1.0)
            part.trust = list(map(moves.beside, trust.unbind(), part.parameters))

    @abstractmethod
    def _measure(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> Tensors:
        """Advance the states that need no norm; what is to be measured."""

    @abstractmethod
    def _trust_ratio(self, group: dict[str, Any], weight: Tensor, measured: Tensor) -> Tensor:
        """[n]: where both norms, [n], are above 0."""

    @abstractmethod
    def _apply(self, part: GroupStep) -> None:
        """Change the parameters."""


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling of SGD with momentum, for large batches.

    You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1. With gradient g
    and weights w of a parameter, momentum m, weight decay β, trust coefficient η, learning rate lr:

        λ = η |w| / (|g| + β |w|)
        v = m v + lr λ (g + β w)
        w = w - v

    Where either norm is 0, or the group has `trust_ratio=False`, λ is 1, as in the authors' code. Norms are
    norms of whole parameters, also where `zeroshard.initialize` has sharded them.

    Args:
        params: parameters, of any shape, or groups of them; a group may have any of the following by itself.
        lr: the global learning rate; the paper's learning rate is a schedule of it.
        momentum: m, in [0, 1).
        weight_decay: β; a group with 0 is left out of it.
        trust_coefficient: η.
        trust_ratio: whether learning rates are scaled: usually not for biases and norms.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """

    ranges: ClassVar[Ranges] = {
        **LayerWise.ranges,
        "momentum": number_range(below=1.0),
        "trust_coefficient": number_range(),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        trust_ratio: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        ratios = {"trust_coefficient": trust_coefficient, "trust_ratio": trust_ratio}
        super().__init__(params, defaults | ratios)

    def _measure(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> Tensors:
        return grads

    def _trust_ratio(self, group: dict[str, Any], weight: Tensor, measured: Tensor) -> Tensor:
        decay: float = group["weight_decay"]
        return weight.mul(group["trust_coefficient"]) / (measured + decay * weight)

    def _apply(self, part: GroupStep) -> None:
        group, parameters = part.group, part.parameters
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        updates = torch._foreach_add(part.measured, parameters, alpha=group["weight_decay"])
        part.scale(updates)
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, updates, alpha=group["lr"])
        torch._foreach_sub_(parameters, momenta)


class LAMB(LayerWise):
    """Layer-wise adaptive moments, for large batches.

    You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2,
    with φ the identity. With gradient g and weights x of a parameter, learning rate η, weight decay λ:

        m = β1 m + (1 - β1) g,    v = β2 v + (1 - β2) g²
        r = (m / (1 - β1^t)) / (√(v / (1 - β2^t)) + ε)
        x = x - η |x| / |r + λ x| (r + λ x)

    Where either norm is 0, or the group has `trust_ratio=False`, their ratio is taken as 1. Norms are norms
    of whole parameters, also where `zeroshard.initialize` has sharded them. A step needs memory for one
    update of each slice.

    Args:
        params: parameters, of any shape, or groups of them; a group may have any of the following by itself.
        lr: η.
        betas: (β1, β2), in [0, 1).
        eps: ε.
        weight_decay: λ; a group with 0 is left out of it.
        trust_ratio: whether updates are scaled: usually not for biases and norms.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """

    ranges: ClassVar[Ranges] = {**LayerWise.ranges, "eps": number_range(), "betas": betas_range(2)}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        trust_ratio: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "trust_ratio": trust_ratio})

    def _measure(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> Tensors:
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            state["step"] += 1
        states = [self.state[parameter] for parameter in parameters]
        means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        updates = torch._foreach_div(squares, [1 - beta2 ** s["step"] for s in states])
        torch._foreach_sqrt_(updates)
        torch._foreach_add_(updates, group["eps"])
        torch._foreach_mul_(updates, [1 - beta1 ** s["step"] for s in states])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, means)
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        return updates

    def _trust_ratio(self, group: dict[str, Any], weight: Tensor, measured: Tensor) -> Tensor:
        return weight / measured

    def _apply(self, part: GroupStep) -> None:
        part.scale(part.measured)
        torch._foreach_add_(part.parameters, part.measured, alpha=-part.group["lr"])
