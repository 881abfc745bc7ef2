"""LAMB and LARS with 8-bit states: trust ratios are those of updates before they are quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroshard.optim.eightbit import rules, states
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.eightbit.rules import Numbers
from zeroshard.optim.eightbit.states import MIN_8BIT_SIZE
from zeroshard.optim.eightbit.step import take_step
from zeroshard.optim.layerwise import LAMB, LARS, LayerWise, Part, Tensors


class _LayerWise8bit(BlockwiseOptimizer, LayerWise):
    """Norms are of all parameters of a group together, so all but the threshold is the same for a group."""

    @property
    def _overridable(self) -> tuple[str, ...]:
        return ("min_8bit_size",)

    def _set_threshold(self, min_8bit_size: int) -> None:
        self.defaults["min_8bit_size"] = min_8bit_size
        for group in self.param_groups:
            group.setdefault("min_8bit_size", min_8bit_size)
            self.check_group(group)

    def _begun(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, its step counted."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            threshold = self.settings(parameter, group)["min_8bit_size"]
            state.update(states.begin(self.rule, parameter, threshold))
        state["step"] = int(state["step"]) + 1
        return state


class LAMB8bit(_LayerWise8bit, LAMB):
    """LAMB whose two moments take a byte an element; the update comes from them before they are quantized.

    Arguments as `LAMB`, and:
        min_8bit_size: elements of a whole parameter from which its states are quantized.
    """

    rule = rules.LAMB

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

    def check_group(self, group: dict[str, Any]) -> None:
        LAMB.check_group(self, group)
        super().check_group(group)

    def _measure(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> Tensors:
        return [self._update(*pair, group) for pair in zip(parameters, grads, strict=True)]

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """In the shape of the parameter, float32: what the trust ratio is to scale."""
        state = self._begun(parameter, group)
        numbers = Numbers(
            lr=0.0,  # of no use before the trust ratio is known
            weight_decay=group["weight_decay"],
            betas=group["betas"],
            eps=group["eps"],
            step=state["step"],
        )
        update = grad.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        take_step(self.rule, states.flat(parameter), update.view(-1), states.read(self.rule, state), numbers)
        return update


class LARS8bit(_LayerWise8bit, LARS):
    """LARS whose momentum takes a byte an element. Arguments as `LARS`, and as `LAMB8bit` has it."""

    rule = rules.LARS

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

    def check_group(self, group: dict[str, Any]) -> None:
        LARS.check_group(self, group)
        super().check_group(group)

    def _apply(self, part: Part) -> None:
        group, parameters = part.group, part.parameters
        ratios = torch.stack(part.trust).tolist() if part.trust else [1.0] * len(parameters)
        for parameter, grad, ratio in zip(parameters, part.measured, ratios, strict=True):
            state = self._begun(parameter, group)
            numbers = Numbers(
                lr=group["lr"] * ratio,
                weight_decay=group["weight_decay"],
                betas=(group["momentum"],),
                step=state["step"],
            )
            values = states.flat(parameter)
            take_step(self.rule, values, states.flat(grad), states.read(self.rule, state), numbers)
            if values.data_ptr() != parameter.data_ptr():
                parameter.copy_(values.view(parameter.shape))
