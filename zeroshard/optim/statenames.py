"""The states of an optimizer under the names that checkpoints have, and their form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.optim.adopt import bitsandbytes
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.eightbit.rule import Rule, rule_named
from zeroshard.optim.eightbit.states import whole_size


def to_common(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter under the names that torch's optimizers use.

    A quantized state has its uint8 codes under the name, and its scales under `<name>_absmax`.
    """
    is_theirs = bitsandbytes.is_bitsandbytes(optimizer)
    return bitsandbytes.unpack(optimizer, state) if is_theirs else dict(state)


def from_common(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter under the optimizer's own names, from the names that torch uses."""
    is_theirs = bitsandbytes.is_bitsandbytes(optimizer)
    return bitsandbytes.pack(optimizer, state) if is_theirs else dict(state)


def rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule that tells which states are signed, also of derived classes; None where no rule has them."""
    if isinstance(optimizer, BlockwiseOptimizer):
        return optimizer.rule
    is_theirs = bitsandbytes.is_bitsandbytes(optimizer)
    return bitsandbytes.rule_of(optimizer) if is_theirs else rule_named(type(optimizer).__name__)


def num_bits(optimizer: Optimizer, parameter: Tensor) -> int:
    """8 if the states of a parameter are to be codes of a byte, else 32."""
    if bitsandbytes.is_bitsandbytes(optimizer):
        return bitsandbytes.num_bits(optimizer, parameter)
    if not isinstance(optimizer, BlockwiseOptimizer):
        return 32
    settings = optimizer.settings(parameter, _group_of(optimizer, parameter))
    return 8 if whole_size(parameter) >= settings["min_8bit_size"] else 32


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(held is parameter for held in group["params"]):
            return group
    raise AssertionError("a parameter of the optimizer")
