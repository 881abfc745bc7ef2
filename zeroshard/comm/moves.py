"""Small values between device and host, and tensors by the place that they lie in.

Operators take tensors of one device. With main parameters on the host, totals lie on the device and gradients
on the host, or some here and some there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device that computes; values of the host are copied on the current stream."""
    return tensor.to(device, non_blocking=True) if tensor.is_cpu else tensor.to(device)


def beside(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor on the device of another tensor; for a copy to the host, the host waits."""
    return to_device(tensor, other.device)


def is_beside(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors lie on one device."""
    return tensor.device == other.device


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of tensors in groups of one device, in the order of their first tensors."""
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(index)
    return list(groups.values())
