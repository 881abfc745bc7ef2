"""Host memory for values of the device, kept for the next step: to allocate pinned memory is slow.

A buffer is taken for a copy and given back later, perhaps while the device has not come to its last copy yet.
That is safe, as the next copy into the buffer is queued behind. Torch waits for such copies before it gives
pinned memory to anybody else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PAGE = 4096
_CLASSES = 8
"""Classes of sizes between a power of two and the next, so that batches of many lengths share buffers. A
buffer is at most an eighth larger than asked for, or a page."""


@dataclass(slots=True)
class HostMeter:
    """Bytes of host memory for offloaded values, over all pools of an engine, free buffers included."""

    num_bytes: int = 0
    pinned: int = 0
    """The part of them that is pinned."""

    def add(self, num_bytes: int, *, pinned: bool) -> None:
        """Add bytes; a negative number takes them away."""
        self.num_bytes += num_bytes
        self.pinned += num_bytes if pinned else 0


def host_memory(num_bytes: int, pinned: bool) -> Tensor:
    """Allocate host memory: uint8, [num_bytes], uninitialized.

    Args:
        num_bytes: number of bytes.
        pinned: True for memory that an accelerator copies from and to while the host goes on.

    Raises:
        RuntimeError: there is not so much memory.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def size_class(num_bytes: int) -> int:
    """Return the bytes of the buffer for `num_bytes`: a multiple of a page, up to an eighth more."""
    step = max(_PAGE, (1 << (max(num_bytes, 1).bit_length() - 1)) // _CLASSES)
    return -(-num_bytes // step) * step


class HostPool:
    """Buffers by size class. Those in use and the free ones are never more than were in use at once.

    Args:
        meter: counts the bytes of all buffers.
        pinned: True for pinned memory.
    """

    def __init__(self, meter: HostMeter, *, pinned: bool) -> None:
        self._meter, self._pinned = meter, pinned
        self._free: list[Tensor] = []
        """The buffer that was given back last is at the end."""
        self._bytes_in_use = self._bytes_free = self._most_in_use = 0

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer: uint8, [size_class(num_bytes)].

        Raises:
            RuntimeError: there is not so much memory.
        """
        size = size_class(num_bytes)
        buffer = self._find(size)
        self._most_in_use = max(self._most_in_use, self._bytes_in_use + size)
        while self._free and self._bytes_in_use + size + self._bytes_free > self._most_in_use:
            dropped = self._free.pop(0).nbytes
            self._bytes_free -= dropped
            self._meter.add(-dropped, pinned=self._pinned)
        if buffer is None:
            buffer = self._allocate(size)
            self._meter.add(size, pinned=self._pinned)
        self._bytes_in_use += size
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, as `take` returned it."""
        self._bytes_in_use -= buffer.nbytes
        self._bytes_free += buffer.nbytes
        self._free.append(buffer)

    def _allocate(self, size: int) -> Tensor:
        try:
            return host_memory(size, self._pinned)
        except RuntimeError as error:
            kind = "pinned host memory" if self._pinned else "host memory"
            raise RuntimeError(
                f"no {size} bytes of {kind} for offloaded values, which have {self._meter.num_bytes} bytes: "
                f"offload less, or use smaller micro-batches (torch: {str(error).splitlines()[0]})"
            ) from error

    def _find(self, size: int) -> Tensor | None:
        for place in reversed(range(len(self._free))):
            if self._free[place].nbytes == size:
                self._bytes_free -= size
                return self._free.pop(place)
        return None
