"""Host memory for values of the device, kept for the next step: to pin memory is slow.

A buffer is taken for a copy and given back later, perhaps while the device has not come to its last copy yet.
That is safe, as the next copy into the buffer is queued behind.

[Note: Buffers end after their copies] Pinned memory of torch would wait for such copies by itself, but torch
rounds it up to a power of two. The memory here has the exact size, and the system takes it back with the last
tensor over it, whatever the device still does there. So each buffer notes the end of its last copy, and the
host waits for that before the memory goes: when the pool drops a buffer, when the engine closes, and when the
garbage collector finds it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from zeroshard.comm.streams import Mark
from zeroshard.tiers.memory import host_memory

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


class HostBuffer:
    """One buffer and the device work that uses it; see [Note: Buffers end after their copies].

    Args:
        memory: uint8, [size_class]; nobody else holds it or a view of it.
    """

    __slots__ = ("_last", "_process", "held", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.held: tuple[Tensor, ...] = ()
        """Memory of the device that goes no earlier than the buffer, or when somebody has waited for it."""
        self._last: Mark | None = None
        self._process = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.memory.nbytes

    def in_use_until(self, mark: Mark) -> None:
        """Note the end of a copy from or to the memory; it lies after those of all earlier copies."""
        self._last = mark

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # A forked process has no part in the device, nor in the registration of the memory.
        if self._last is not None and not is_ending() and self._process == os.getpid():
            self._last.synchronize()


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
        self._free: list[HostBuffer] = []
        """The buffer that was given back last is at the end."""
        self._bytes_in_use = self._bytes_free = self._most_in_use = 0

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of `size_class(num_bytes)`; the host waits for copies of buffers that go for it.

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

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back, as `take` returned it."""
        self._bytes_in_use -= buffer.nbytes
        self._bytes_free += buffer.nbytes
        self._free.append(buffer)

    def _allocate(self, size: int) -> HostBuffer:
        try:
            return HostBuffer(host_memory(size, self._pinned))
        except RuntimeError as error:
            kind = "pinned host memory" if self._pinned else "host memory"
            raise RuntimeError(
                f"no {size} bytes of {kind} for offloaded values, which have {self._meter.num_bytes} bytes: "
                f"offload less, or use smaller micro-batches ({str(error).splitlines()[0]})"
            ) from error

    def _find(self, size: int) -> HostBuffer | None:
        for place in reversed(range(len(self._free))):
            if self._free[place].nbytes == size:
                self._bytes_free -= size
                return self._free.pop(place)
        return None
