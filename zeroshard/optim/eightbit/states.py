"""The states of a parameter in an optimizer: codes under their usual names, scales under `<name>_absmax`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.optim.eightbit.blocks import Exact, QuantizedState, StateValues
from zeroshard.optim.eightbit.codebook import codebook
from zeroshard.optim.eightbit.rule import Rule
from zeroshard.parameters.sharded import ShardedParameter

MIN_8BIT_SIZE = 4096
"""Elements of a whole parameter from which its states are quantized, as in bitsandbytes."""
ABSMAX = "_absmax"
"""The ending of the name of a state's scales."""


def begin(rule: Rule, parameter: Tensor, min_8bit_size: int) -> dict[str, Any]:
    """Return the first state of a parameter, by name: zeros, and a count of steps.

    Args:
        rule: the rule, with the names of its states.
        parameter: a parameter, or a slice, of any shape. States have this shape in float32; quantized ones
            are uint8 codes of this shape and scales, [ceil(n / 256)], float32, under `<name>_absmax`.
        min_8bit_size: elements of a whole parameter from which states are quantized.
    """
    state: dict[str, Any] = {"step": 0}
    is_quantized = whole_size(parameter) >= min_8bit_size
    for name, is_signed in rule.states.items():
        if is_quantized:
            zeros = QuantizedState.zeros(parameter.numel(), codebook(is_signed, parameter.device))
            state[name], state[name + ABSMAX] = zeros.codes.view(parameter.shape), zeros.absmax
        else:
            state[name] = torch.zeros(parameter.shape, device=parameter.device)
    return state


def read(rule: Rule, state: dict[str, Any]) -> list[StateValues]:
    """The states of a parameter that has begun."""
    states: list[StateValues] = []
    for name, is_signed in rule.states.items():
        values = state[name].view(-1)
        absmax = state.get(name + ABSMAX)
        if absmax is None:
            states.append(Exact(values))
        else:
            states.append(QuantizedState(values, absmax, codebook(is_signed, values.device)))
    return states


def whole_size(parameter: Tensor) -> int:
    """Return the number of elements of a parameter over all ranks."""
    return parameter.full_shape.numel() if isinstance(parameter, ShardedParameter) else parameter.numel()


def flat(tensor: Tensor | nn.Parameter, *, is_widened: bool = True) -> Tensor:
    """[n], contiguous, no part of a graph, float32 if it is widened; the same memory where possible."""
    values = tensor.detach().reshape(-1)
    return values.float() if is_widened else values
