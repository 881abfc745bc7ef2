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

    On CUDA torch has kernels for lists of one dtype; of several dtypes it takes tensor by tensor.
    """
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()
