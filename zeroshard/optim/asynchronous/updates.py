"""The next updates of an optimizer, read from its momentum: the changes that steps are taken to make.

    SGD         -lr v                                        v: the momentum buffer, [n], like a slice
    Adam(W)     -lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps),     and -lr * decay * w of AdamW

For SGD this is the prediction of SpecTrain (Chen et al. 2018, section 3.2) and of linear weight prediction
(Kosson et al. 2021, "Pipelined Backpropagation at Scale", section 3.3). Adam's is its own update, with the
moments of the last step, as no new gradient is known: the same idea for another rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from zeroshard.optim.eightbit import rules, states
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.eightbit.rule import Rule

Update = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any], int, Tensor], None]
"""(weights, group, state, ahead, out): write weights + ahead * change into `out`, which is like the weights.

Before the first step the change is zero. This runs before most actions, so it allocates nothing of the size
of the weights where the states have their dtype.
"""


def update_of(optimizer: Optimizer, asked: str) -> Update:
    """Return the function that moves weights along the next update of an optimizer.

    Args:
        optimizer: the optimizer.
        asked: the config key with its value, for errors.

    Raises:
        ValueError: the optimizer is none of those above, or has no momentum.
    """
    if type(optimizer) is SGD:
        require_groups(optimizer, asked, off=("nesterov", "maximize"), momentum=True)
        return _of_sgd
    if type(optimizer) in (Adam, AdamW):
        require_groups(optimizer, asked, off=("maximize",))
        return _of_adam
    if isinstance(optimizer, BlockwiseOptimizer) and optimizer.rule in (rules.ADAM, rules.SGD):
        if optimizer.overrides:
            raise ValueError(f"{asked}: expected an optimizer without overrides of single parameters")
        return functools.partial(_of_codes, optimizer.rule)
    raise ValueError(
        f"{asked} moves weights along the next update of the optimizer: expected SGD with momentum, Adam or "
        f"AdamW, or their forms of 8 bits, got {type(optimizer).__name__}. 'estimate' and 'lwp-weights' work "
        "with every optimizer"
    )


def require_groups(
    optimizer: Optimizer, asked: str, *, off: Sequence[str] = (), momentum: bool = False
) -> None:
    """Refuse values of parameter groups that a method cannot work with.

    Args:
        optimizer: the optimizer.
        asked: the config key with its value, for errors.
        off: hyperparameters that must be false or 0, in all groups that have them.
        momentum: True if the momentum must be above 0.

    Raises:
        ValueError: a group has another value.
    """
    for group in optimizer.param_groups:
        for key in off:
            if group.get(key):
                raise ValueError(
                    f"{asked} with {type(optimizer).__name__}: expected {key}=False, got {group[key]}"
                )
        if momentum and not group["momentum"] > 0:
            raise ValueError(
                f"{asked} with {type(optimizer).__name__}: expected momentum > 0, got {group['momentum']}"
            )


def _of_sgd(
    weights: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], ahead: int, out: Tensor
) -> None:
    velocity = state.get("momentum_buffer")
    if velocity is None:
        out.copy_(weights)
    else:
        _sgd(weights, group, velocity, ahead, out)


def _sgd(weights: Tensor, group: Mapping[str, Any], velocity: Tensor, ahead: int, out: Tensor) -> None:
    torch.add(weights, velocity.view_as(weights), alpha=-ahead * float(group["lr"]), out=out)


def _of_adam(
    weights: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], ahead: int, out: Tensor
) -> None:
    if "exp_avg" not in state:
        out.copy_(weights)
        return
    second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    _adam(weights, group, (state["exp_avg"], second), float(state["step"]), ahead, out)


def _adam(
    weights: Tensor,
    group: Mapping[str, Any],
    moments: tuple[Tensor, Tensor],
    step: float,
    ahead: int,
    out: Tensor,
) -> None:
    first, second = (moment.view_as(weights) for moment in moments)
    (beta1, beta2), rate = group["betas"], ahead * float(group["lr"])
    root = torch.sqrt(second, out=out if out.dtype == second.dtype else None)
    root.div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    torch.addcdiv(weights, first, root, value=-rate / (1 - beta1**step), out=out)
    if group.get("decoupled_weight_decay"):
        out.sub_(weights, alpha=rate * group["weight_decay"])


def _of_codes(
    rule: Rule,
    weights: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    ahead: int,
    out: Tensor,
) -> None:
    if not state:
        out.copy_(weights)
        return
    loaded = [one.load() for one in states.read(rule, dict(state))]
    if rule is rules.SGD:
        _sgd(weights, group, loaded[0], ahead, out)
    else:
        decoupled = {**group, "decoupled_weight_decay": True}
        _adam(weights, decoupled, (loaded[0], loaded[1]), float(state["step"]), ahead, out)
