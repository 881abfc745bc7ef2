"""Flat scratch buffers that a backward pass uses again and again."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class BufferPool:
    """Uninitialized 1-D buffers by dtype and size; empty between two backward passes.

    On a GPU a buffer must be given back only when the compute stream has waited for its last use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)

    def take(self, dtype: torch.dtype, size: int) -> Tensor:
        free = self._free[dtype, size]
        return free.pop() if free else torch.empty(size, dtype=dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        self._free[buffer.dtype, buffer.numel()].append(buffer)

    def release(self) -> None:
        """Return the memory of every free buffer."""
        self._free.clear()
