"""What the states of an optimizer are called in a checkpoint, whatever the optimizer itself calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer


def to_common(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter under the names that torch's optimizers use.

    Of quantized ones: uint8 codes under the name, scales under `<name>_absmax`.
    """
    return dict(state)


def from_common(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Back under the names of the optimizer."""
    return dict(state)
