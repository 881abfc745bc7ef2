"""Flat scratch buffers that a backward pass uses repeatedly."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm import streams

Ranges = Sequence[slice]
"""Parts of a flat buffer."""


class BufferPool:
    """1-D buffers by dtype, size and the ranges that hold zeros; empty between two backward passes.

    On a CPU new memory is slow: the kernel clears each of its pages. So buffers that were given back are
    kept, but never more than were in use at once: a new buffer drops the oldest free ones until all of them
    together are no more than the highest number of bytes that this backward has had in use. On an accelerator
    torch's caching allocator is the pool, and this one keeps nothing. There a buffer must be given back only
    when the compute stream has waited for its last use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[tuple[object, Tensor]] = deque(maxlen=0 if streams.has_streams(device) else None)
        """Kinds and buffers; the buffer that was given back last is at the end."""
        self._bytes_in_use = 0
        self._most_in_use = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, those in use and the free ones."""
        return self._bytes_in_use + sum(buffer.nbytes for _, buffer in self._free)

    def take(self, dtype: torch.dtype, size: int, zeros: Ranges = ()) -> Tensor:
        """Return a buffer of zeros in the ranges `zeros`, with other elements uninitialized: [size].

        Args:
            dtype: dtype of the elements.
            size: number of elements.
            zeros: ranges into which only zeros are written until the buffer is given back.
        """
        buffer = self._find(_kind(dtype, size, zeros))
        if buffer is None:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            if zeros:
                torch._foreach_zero_([buffer[part] for part in zeros])  # one kernel for all of them
        self._bytes_in_use += buffer.nbytes
        self._most_in_use = max(self._most_in_use, self._bytes_in_use)
        while self._free and self.num_bytes > self._most_in_use:
            self._free.popleft()
        return buffer

    def give(self, buffer: Tensor, zeros: Ranges = ()) -> None:
        """Take a buffer back.

        Args:
            buffer: [size], as `take` returned it; its former user does not touch it again.
            zeros: the ranges that were given to `take`, still zero.
        """
        self.drop(buffer)
        self._free.append((_kind(buffer.dtype, buffer.numel(), zeros), buffer))

    def drop(self, buffer: Tensor) -> None:
        """Drop a buffer of `take`: it has another owner now and will not be given back."""
        self._bytes_in_use -= buffer.nbytes

    def release(self) -> None:
        """Return the memory of every free buffer, at the end of a backward."""
        self._free.clear()
        self._most_in_use = self._bytes_in_use

    def _find(self, kind: object) -> Tensor | None:
        for place in reversed(range(len(self._free))):
            found, buffer = self._free[place]
            if found == kind:
                del self._free[place]
                return buffer
        return None


def _kind(dtype: torch.dtype, size: int, zeros: Ranges) -> object:
    return dtype, size, tuple((part.start, part.stop) for part in zeros)
