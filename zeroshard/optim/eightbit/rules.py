"""What one step does to the elements of a parameter and of its states, in float32.

Each operation is rounded by itself (no fused multiply-add), so that every kernel can give the same bits.
kernels.py has the same rules for compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The scalars of a step; each rule uses some."""

    lr: float
    weight_decay: float
    betas: tuple[float, ...]
    eps: float = 0.0
    alpha: float = 0.0
    """Of the slow average of AdEMAMix."""
    step: int = 1
    """1 in the first step of a parameter."""

    @staticmethod
    def of(settings: Mapping[str, Any], step: int) -> Numbers:
        """From hyperparameters by their usual names; what has a schedule as it is in this step."""
        betas = tuple(settings.get("betas", (settings.get("momentum", 0.0),)))
        alpha = settings.get("alpha", 0.0)
        if t_alpha := settings.get("t_alpha"):
            alpha = min(step * alpha / t_alpha, alpha)
        if (t_beta3 := settings.get("t_beta3")) and step < t_beta3:
            beta1, beta2, beta3 = betas
            done, log1, log3 = step / t_beta3, math.log(beta1), math.log(beta3)
            beta3 = min(math.exp(log1 * log3 / ((1 - done) * log3 + done * log1)), beta3)
            betas = (beta1, beta2, beta3)
        return Numbers(
            lr=float(settings["lr"]),
            weight_decay=float(settings["weight_decay"]),
            betas=betas,
            eps=settings.get("eps", 0.0),
            alpha=alpha,
            step=step,
        )

    @property
    def decay(self) -> float:
        """What decoupled weight decay leaves of a parameter."""
        return 1 - self.lr * self.weight_decay

    @property
    def correction1(self) -> float:
        """Of the bias of the first moment, to be multiplied."""
        return 1 / (1 - self.betas[0] ** self.step)

    @property
    def correction2(self) -> float:
        """Of the bias of the second moment's root, to be multiplied."""
        return float((1 - self.betas[1] ** self.step) ** -0.5)


Scalars = tuple[float, ...]
Update = Callable[[Tensor, Tensor, Sequence[Tensor], Scalars], None]
"""(parameter, gradient, states, scalars): changes the parameter and the states, all [n] float32."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer's states, and what a step does to them."""

    name: str
    """What bitsandbytes calls it."""
    states: tuple[str, ...]
    is_signed: tuple[bool, ...]
    scalars: Callable[[Numbers], Scalars]
    """What the update needs of the numbers, computed once in float64."""
    update: Update

    @property
    def has_operator(self) -> bool:
        """True if bitsandbytes has it on a GPU: its LAMB and LARS know no trust ratio there."""
        return self.name not in ("lamb", "lars")


def _root(x: Tensor) -> Tensor:
    """The square root, rounded exactly: on the CPU, torch's may be off by the last bit."""
    if not x.is_cpu:
        return x.sqrt()
    with np.errstate(invalid="ignore"):  # nan goes on as nan
        return torch.from_numpy(np.sqrt(x.numpy()))


def _adam_scalars(n: Numbers) -> Scalars:
    beta1, beta2 = n.betas
    return beta1, 1 - beta1, beta2, 1 - beta2, n.decay, n.correction2, n.eps, n.lr * n.correction1


def _adam(p: Tensor, g: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
    """Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2."""
    beta1, rest1, beta2, rest2, decay, correction2, eps, step_size = scalars
    m, v = states
    m.mul_(beta1).add_(g * rest1)
    v.mul_(beta2).add_((g * g).mul_(rest2))
    denominator = _root(v).mul_(correction2).add_(eps)
    p.mul_(decay).sub_((m / denominator).mul_(step_size))


def _lion_scalars(n: Numbers) -> Scalars:
    beta1, beta2 = n.betas
    return beta1, 1 - beta1, beta2, 1 - beta2, n.decay, n.lr


def _lion(p: Tensor, g: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", program 1."""
    beta1, rest1, beta2, rest2, decay, lr = scalars
    (m,) = states
    direction = (m * beta1).add_(g * rest1)
    direction = direction.sign().where(direction.isnan().logical_not_(), direction)  # torch has 0 for nan
    p.mul_(decay).sub_(direction.mul_(lr))
    m.mul_(beta2).add_(g * rest2)


def _momentum_scalars(n: Numbers) -> Scalars:
    return n.betas[0], n.weight_decay, n.lr


def _momentum(p: Tensor, g: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
    """Sutskever et al. 2013, as torch.optim.SGD without dampening; weight decay is added to the gradient."""
    momentum, weight_decay, lr = scalars
    (m,) = states
    m.mul_(momentum).add_((p * weight_decay).add_(g))
    p.sub_(m * lr)


def _ademamix_scalars(n: Numbers) -> Scalars:
    beta1, beta2, beta3 = n.betas
    rests = 1 - beta1, 1 - beta2, 1 - beta3
    return *n.betas, *rests, n.decay, n.correction1, n.correction2, n.eps, n.alpha, n.lr


def _ademamix(p: Tensor, g: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
    """Pagliardini et al. 2024, "The AdEMAMix Optimizer", algorithm 1."""
    beta1, beta2, beta3, rest1, rest2, rest3, decay, correction1, correction2, eps, alpha, lr = scalars
    m, slow, v = states
    m.mul_(beta1).add_(g * rest1)
    slow.mul_(beta3).add_(g * rest3)
    v.mul_(beta2).add_((g * g).mul_(rest2))
    denominator = _root(v).mul_(correction2).add_(eps)
    mixed = (m * correction1).add_(slow * alpha)
    p.mul_(decay).sub_((mixed / denominator).mul_(lr))


def _lamb_scalars(n: Numbers) -> Scalars:
    beta1, beta2 = n.betas
    return beta1, 1 - beta1, beta2, 1 - beta2, n.correction1, n.correction2, n.eps, n.weight_decay


def _lamb(p: Tensor, g: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
    """The update before its length is known takes the place of the gradient; the parameter stays.

    You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2.
    """
    beta1, rest1, beta2, rest2, correction1, correction2, eps, weight_decay = scalars
    m, v = states
    m.mul_(beta1).add_(g * rest1)
    v.mul_(beta2).add_((g * g).mul_(rest2))
    denominator = _root(v).mul_(correction2).add_(eps)
    g.copy_((m * correction1).div_(denominator).add_(p * weight_decay))


def _lars(p: Tensor, g: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
    """You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1."""
    momentum, weight_decay, step_size = scalars
    (m,) = states
    m.mul_(momentum).add_((p * weight_decay).add_(g).mul_(step_size))
    p.sub_(m)


def _rmsprop_scalars(n: Numbers) -> Scalars:
    return n.betas[0], 1 - n.betas[0], n.weight_decay, n.eps, n.lr


def _rmsprop(p: Tensor, g: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
    """Tieleman and Hinton 2012, lecture 6.5; weight decay is added to the gradient."""
    beta, rest, weight_decay, eps, lr = scalars
    (s,) = states
    decayed = (p * weight_decay).add_(g)
    s.mul_(beta).add_((decayed * decayed).mul_(rest))
    p.sub_((decayed / _root(s).add_(eps)).mul_(lr))


def _adagrad_scalars(n: Numbers) -> Scalars:
    return n.weight_decay, n.eps, n.lr


def _adagrad(p: Tensor, g: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
    """Duchi et al. 2011, "Adaptive Subgradient Methods", figure 1; weight decay is added to the gradient."""
    weight_decay, eps, lr = scalars
    (s,) = states
    decayed = (p * weight_decay).add_(g)
    s.add_(decayed * decayed)
    p.sub_((decayed / _root(s).add_(eps)).mul_(lr))


_MOMENTS = ("exp_avg", "exp_avg_sq"), (True, False)
ADAM = Rule("adam", *_MOMENTS, _adam_scalars, _adam)
LAMB = Rule("lamb", *_MOMENTS, _lamb_scalars, _lamb)
LION = Rule("lion", ("exp_avg",), (True,), _lion_scalars, _lion)
MOMENTUM = Rule("momentum", ("momentum_buffer",), (True,), _momentum_scalars, _momentum)
LARS = Rule("lars", ("momentum_buffer",), (True,), _momentum_scalars, _lars)
ADEMAMIX = Rule(
    "ademamix",
    ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
    (True, True, False),
    _ademamix_scalars,
    _ademamix,
)
RMSPROP = Rule("rmsprop", ("square_avg",), (True,), _rmsprop_scalars, _rmsprop)
ADAGRAD = Rule("adagrad", ("sum",), (True,), _adagrad_scalars, _adagrad)
"""Signed, though squares are not: bitsandbytes has the signed map for all single states."""
