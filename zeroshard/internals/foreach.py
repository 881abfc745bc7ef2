"""Norms of many tensors by few kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def foreach_sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """[n], float64: the sum of squares of each tensor, by one operator for all tensors of a dtype.

    Values are converted to float64 in registers, so nothing is copied. Another cut of gradients into tensors
    moves the sums in their 16th digit. A norm that is rounded to float32 keeps 7 digits. So it is the same at
    all stages, unless it lies that close to the middle between two float32 numbers.
    """
    return torch.stack(foreach_norm(tensors, 2, torch.float64)).square()


def foreach_norm(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm of each tensor, 0-dim, as `torch._foreach_norm` computes it, like torch's own clipping.

    On CUDA it has kernels for lists of one dtype, so each dtype is a list of its own.

    Args:
        order: 1, 2 or inf. For inf no tensor may be empty.
        dtype: the dtype of the result and of the sum; None: the dtype of the tensor.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    norms: dict[int, Tensor] = {}
    for indices in by_dtype.values():
        found = torch._foreach_norm([tensors[index] for index in indices], order, dtype=dtype)
        norms |= zip(indices, found, strict=True)
    return [norms[index] for index in range(len(tensors))]
