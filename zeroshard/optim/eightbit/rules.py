"""The optimizers with states in blocks: their base, and the rules, each with its optimizers.

The defaults of hyperparameters are in the signatures of the optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroshard.internals.dispatch import past_guards
from zeroshard.optim.eightbit import blocks
from zeroshard.optim.eightbit.rule import (
    RULES,
    SIGNED,
    UNSIGNED,
    Rule,
    Scalars,
    Tensors,
    quotient,
    root,
    sign,
)
from zeroshard.optim.eightbit.step import has_kernel, take_step
from zeroshard.optim.layerwise import LAMB, LARS, GroupStep, LayerWise
from zeroshard.optim.ranges import RANGES, ChecksRanges, betas_range, called, check_ranges, dense
from zeroshard.plan.layout import MIN_8BIT_SIZE
from zeroshard.stepping.rounding import Bits, BitsOf, load_states, no_bits


class BlockwiseOptimizer(ChecksRanges):
    """Keeps states in blocks of 256: uint8 codes under their usual names, scales under `<name>_absmax`.

    Over slices that start on a block, as a sharded model has them, codes and scales are the same as for the
    whole parameter, at any number of ranks. Parameters of less than `min_8bit_size` elements, counted over
    all ranks, have float32 states. Updates are computed in float32.

    Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
    """

    rule: ClassVar[Rule]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of a `state_dict()`; codes and scales keep their dtypes."""
        load_states(self, super().load_state_dict, state_dict)
        for group in self.param_groups:  # an optimizer of torch has none of it
            group.setdefault("min_8bit_size", self.defaults["min_8bit_size"])

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a hyperparameter that is out of its range."""
        super().check_group(group)
        check_ranges(group, {**RANGES, **self.rule.ranges})

    def compile_kernels(self, device: torch.device) -> None:
        """Compile the steps of a GPU, or warn that they cannot be compiled: before the first backward."""
        for group in self.param_groups:
            has_kernel(self.rule, device, len(self.rule.scalars(self.rule.numbers(group, 1))))

    def _step_by_rule(
        self, parameter: Tensor, gradient: Tensor, settings: Mapping[str, Any], bits: Bits | None = None
    ) -> None:
        """Take a parameter and its states through one step; a step that fails is not counted.

        Args:
            gradient: [n], float32; replaced by the update where the rule gives that.
            settings: the hyperparameters of this step.
            bits: the random bits of a bfloat16 parameter, which is rounded stochastically; its gradient may
                have any dtype.
        """
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(blocks.begin(self.rule, parameter, settings["min_8bit_size"]))
        step = int(state["step"]) + 1
        numbers = self.rule.numbers(settings, step)
        values, held = blocks.flat(parameter, is_widened=bits is None), blocks.read(self.rule, state)
        take_step(self.rule, values, gradient, held, numbers, bits)
        state["step"] = step
        if values.data_ptr() != parameter.data_ptr():
            parameter.copy_(values.view(parameter.shape))


class ElementWise8bit(BlockwiseOptimizer):
    """An optimizer whose class has a `rule`, and hands its hyperparameters on.

    Args:
        params: parameters or parameter groups.
        defaults: the hyperparameters of groups that have no others, by name.
        min_8bit_size: elements of a whole parameter from which its states are quantized.

    Raises:
        ValueError: a hyperparameter is out of the range that the rule has for it.
    """

    bits_of: BitsOf = staticmethod(no_bits)
    """The random bits of bfloat16 parameters, which are stepped as they are; see `RoundsItself`."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any], min_8bit_size: int) -> None:
        super().__init__(params, {"min_8bit_size": min_8bit_size, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Returns:
            The result of `closure`, which is called first, with gradients on; None without a closure.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = called(closure)
        with past_guards():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if (gradient := parameter.grad) is not None:
                        bits = self.bits_of(parameter)
                        flat = blocks.flat(dense(gradient), is_widened=bits is None)
                        self._step_by_rule(parameter, flat, group, bits)
        return loss


# ------------------------------------------------------------------------------------------------ rules


def _adam(p: Tensor, g: Tensor, states: Tensors, scalars: Scalars) -> tuple[Tensor, Tensors]:
    """Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2."""
    beta1, rest1, beta2, rest2, decay, correction2, eps, step_size = scalars
    m, v = states
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * g) * rest2
    return p * decay - quotient(m, root(v) * correction2 + eps) * step_size, (m, v)


ADAM = Rule(
    optimizers=("Adam", "AdamW"),
    states={"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED},
    scalars=lambda n: (*n.rates, n.decay, n.correction2, n.eps, n.lr * n.correction1),
    update=_adam,
    ranges={"betas": betas_range(2)},
    operator="adam",
    neutral={"amsgrad": False},
)


class AdamW8bit(ElementWise8bit):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        params: parameters or parameter groups, float32.
        lr: learning rate, >= 0.
        betas: decay of the averages of gradients and of their squares, in [0, 1).
        eps: added to the denominator, >= 0.
        weight_decay: parameters shrink by lr * weight_decay a step, >= 0; None: `own_decay` of the class.
        min_8bit_size: elements of a whole parameter from which its states are quantized.

    Raises:
        ValueError: a number out of range.
    """

    rule = ADAM
    own_decay: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        decay = self.own_decay if weight_decay is None else weight_decay
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
        super().__init__(params, defaults, min_8bit_size)


class Adam8bit(AdamW8bit):
    """Adam; weight decay is decoupled, as in bitsandbytes, and 0 by default. Arguments as `AdamW8bit`."""

    own_decay = 0.0


def _lion(p: Tensor, g: Tensor, states: Tensors, scalars: Scalars) -> tuple[Tensor, Tensors]:
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", program 1."""
    beta1, rest1, beta2, rest2, decay, lr = scalars
    (m,) = states
    return p * decay - sign(m * beta1 + g * rest1) * lr, (m * beta2 + g * rest2,)


LION = Rule(
    optimizers=("Lion",),
    states={"exp_avg": SIGNED},
    scalars=lambda n: (*n.rates, n.decay, n.lr),
    update=_lion,
    ranges={"betas": betas_range(2)},
    operator="lion",
)


class Lion8bit(ElementWise8bit):
    """Lion (Chen et al. 2023, program 1). Arguments as `AdamW8bit`."""

    rule = LION

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, min_8bit_size)


def _sgd(p: Tensor, g: Tensor, states: Tensors, scalars: Scalars) -> tuple[Tensor, Tensors]:
    """Sutskever et al. 2013, as torch.optim.SGD without dampening; weight decay is added to the gradient."""
    momentum, weight_decay, lr = scalars
    (m,) = states
    m = m * momentum + (p * weight_decay + g)
    return p - m * lr, (m,)


SGD = Rule(
    optimizers=("SGD",),
    states={"momentum_buffer": SIGNED},
    scalars=lambda n: (n.betas[0], n.weight_decay, n.lr),
    update=_sgd,
    operator="momentum",
    beta="momentum",
    neutral={"momentum": 0.0, "dampening": 0.0, "nesterov": False},
    without_step=(torch.optim.SGD,),
)


class SGD8bit(ElementWise8bit):
    """SGD with momentum, which must be above 0; weight decay is added to the gradient.

    Other arguments as `AdamW8bit`.
    """

    rule = SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, min_8bit_size)


def _ademamix_schedule(settings: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """Grow `alpha` and the third of `betas` to their values; equations 4 and 5 of the paper."""
    alpha, betas = settings["alpha"], settings["betas"]
    if t_alpha := settings.get("t_alpha"):
        alpha = min(step * alpha / t_alpha, alpha)
    if (t_beta3 := settings.get("t_beta3")) and step < t_beta3:
        beta1, beta2, beta3 = betas
        done, log1, log3 = step / t_beta3, math.log(beta1), math.log(beta3)
        betas = beta1, beta2, min(math.exp(log1 * log3 / ((1 - done) * log3 + done * log1)), beta3)
    return {**settings, "alpha": alpha, "betas": betas}


def _ademamix(p: Tensor, g: Tensor, states: Tensors, scalars: Scalars) -> tuple[Tensor, Tensors]:
    """Pagliardini et al. 2024, "The AdEMAMix Optimizer", algorithm 1."""
    beta1, rest1, beta2, rest2, beta3, rest3, decay, correction1, correction2, eps, alpha, lr = scalars
    m, slow, v = states
    m = m * beta1 + g * rest1
    slow = slow * beta3 + g * rest3
    v = v * beta2 + (g * g) * rest2
    mixed = m * correction1 + slow * alpha
    return p * decay - quotient(mixed, root(v) * correction2 + eps) * lr, (m, slow, v)


ADEMAMIX = Rule(
    optimizers=("AdEMAMix",),
    states={"exp_avg": SIGNED, "exp_avg_slow": SIGNED, "exp_avg_sq": UNSIGNED},
    scalars=lambda n: (*n.rates, n.decay, n.correction1, n.correction2, n.eps, n.settings["alpha"], n.lr),
    update=_ademamix,
    ranges={"betas": betas_range(3)},
    schedule=_ademamix_schedule,
)


class AdEMAMix8bit(ElementWise8bit):
    """AdEMAMix (Pagliardini et al. 2024, algorithm 1): Adam with a second, slow average of gradients.

    Args:
        betas: decay of the fast average, of the squares, and of the slow average.
        alpha: weight of the slow average.
        t_alpha: steps over which alpha grows to its value; None: at once.
        t_beta3: steps over which the slow average's decay grows to its value, with the first and third of
            `betas` above 0; None: at once.

    Other arguments as `AdamW8bit`.
    """

    rule = ADEMAMIX

    def __init__(  # noqa: PLR0913 (the hyperparameters of the paper)
        self,
        params: ParamsT,
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


class TrustRatio8bit(BlockwiseOptimizer, LayerWise):
    """LAMB or LARS with states in blocks.

    Args:
        params: parameters or groups of them.
        settings: the other arguments of LAMB or LARS.
        min_8bit_size: elements of a whole parameter from which its states are quantized.
    """

    def __init__(
        self, params: ParamsT, *settings: Any, min_8bit_size: int = MIN_8BIT_SIZE, **named: Any
    ) -> None:
        super().__init__(params, *settings, **named)  # of LAMB or LARS
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
    return quotient(m * correction1, root(v) * correction2 + eps) + p * weight_decay, (m, v)


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

    def _measure(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        updates = [
            grad.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for grad in grads
        ]
        for parameter, update in zip(parameters, updates, strict=True):
            self._step_by_rule(parameter, update.view(-1), group)
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

    def _apply(self, part: GroupStep) -> None:
        group, parameters = part.group, part.parameters
        ratios = torch.stack(part.trust).tolist() if part.trust else [1.0] * len(parameters)
        for parameter, grad, ratio in zip(parameters, part.measured, ratios, strict=True):
            self._step_by_rule(parameter, blocks.flat(grad), {**group, "lr": group["lr"] * ratio})


def rule_named(name: str | None) -> Rule | None:
    """The rule of an optimizer's class, such as PagedAdamW8bit; None where no rule has its states."""
    return RULES.get((name or "").removeprefix("Paged").removesuffix("8bit").removesuffix("32bit"))
