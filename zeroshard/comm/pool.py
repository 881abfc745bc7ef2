"""Flat scratch buffers that a backward pass uses repeatedly."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import streams


class BufferPool:
    """1-D buffers by dtype and size; empty between two backward passes.

    On a CPU new memory is slow: the kernel clears each of its pages. So buffers that were given back are
    kept, but never more than were in use at once: a new buffer drops the oldest free ones until all of them
    together are no more than the highest number of bytes that this backward has had in use. On an accelerator
    torch's caching allocator is the pool, and this one keeps nothing. There a buffer must be given back only
    when the compute stream has waited for its last use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._keeps = device, not streams.has_streams(device)
        self._free: list[Tensor] = []
        """The buffer that was given back last is at the end."""
        self.num_bytes = 0
        """Bytes of all buffers, those in use and the free ones."""
        self._bytes_in_use = 0
        self._most_in_use = 0

    def take(self, dtype: torch.dtype, size: int) -> Tensor:
        """Return a buffer without values: [size]."""
        fitting = [at for at, one in enumerate(self._free) if (one.dtype, one.numel()) == (dtype, size)]
        if fitting:
            buffer = self._free.pop(fitting[-1])
        else:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self.num_bytes += buffer.nbytes
        self._bytes_in_use += buffer.nbytes
        self._most_in_use = max(self._most_in_use, self._bytes_in_use)
        while self._free and self.num_bytes > self._most_in_use:
            self.num_bytes -= self._free.pop(0).nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, as `take` returned it; its former user does not touch it again."""
        self._bytes_in_use -= buffer.nbytes
        if self._keeps:
            self._free.append(buffer)
        else:
            self.num_bytes -= buffer.nbytes

    def drop(self, buffer: Tensor) -> None:
        """Drop a buffer of `take`: it has another owner now and will not be given back."""
        self._bytes_in_use -= buffer.nbytes
        self.num_bytes -= buffer.nbytes

    def release(self) -> None:
        """Return the memory of every free buffer, at the end of a backward."""
        self._free.clear()
        self.num_bytes = self._most_in_use = self._bytes_in_use
