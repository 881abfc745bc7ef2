"""Host memory of exactly the size that is asked for, pinned or not.

Pinned memory of torch is rounded up to a power of two, so 65 GB of optimizer states would take 128 GB. Here
memory is mapped, and registered with the driver where it is to be pinned. The mapping is shared: the children
of a fork (workers of a data loader) then refer to the same pages. A private mapping would be copied page by
page while they live, as training writes to it, and a pinned one at once. A shared mapping has no huge pages
unless the system forces them, so nothing is resident beyond the pages that were asked for.

Freed tensors in the heap of the C library go back to the system, too (`return_freed_memory`). glibc maps a
large allocation by itself at first, and unmaps it when it is freed. With each one that is freed, the size
from which it does so rises, up to 32 MiB. From then on smaller ones lie in the heap, among small allocations
that stay, and their memory is resident for good. A run whose states are in files allocates and frees a unit
all the time, and would keep many times the memory that it needs.

Host memory for values of the device is kept until the next step: to pin memory is slow. A buffer is
taken for a copy and given back later, perhaps while the device has not come to its last copy yet. That is
safe, as the next copy into the buffer is queued after that one.

[Note: Buffers end after their copies] Pinned memory of torch would wait for such copies by itself, but torch
rounds it up to a power of two. The memory here has the exact size, and the system takes it back with the last
tensor over it, whatever the device still does there. So each buffer notes the end of its last copy, and the
host waits for that before the memory goes: when a free buffer is dropped, when the engine closes, and when
the garbage collector finds it.

Memory of the device is copied to the host, and comes back:

    to_host      |-- copy a --|                             after compute has made a
    compute      | next unit  | wait, a is freed  ...  | needs a: wait |
    to_device                                  |-- a --|    into new memory of compute

Memory of the device is allocated and freed on compute. A copy reads and writes it on a side stream, so it is
held until compute has been told to wait for that copy. A copy that nobody needs any more may die at any
moment, in any thread and stream. Then its memory is left to `HostCopies.release_dead`,
or to the end of the buffer if nobody calls that any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.comm.streams import Mark, SideStream, Streams
from zeroshard.tables import format_bytes

if TYPE_CHECKING:
    from zeroshard.stores.store import TierMemory


class Mapping(mmap.mmap):
    """Memory under a tensor, with a call for the time when nobody holds the tensor any more."""

    when_gone: Callable[[int], None] | None = None
    address = process = 0
    """The id of the process that made it; a forked one has no part in what the call ends."""

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.when_gone is not None and not is_ending() and self.process == os.getpid():
            self.when_gone(self.address)


def host_memory(num_bytes: int, pinned: bool) -> Tensor:
    """Return memory of zeros on the host: [num_bytes] of uint8, its first byte at the start of a page.

    The memory goes back to the system with the last tensor that refers to it. A copy between device and
    pinned memory does not keep it: hold the tensor until the copy is over.

    Args:
        num_bytes: the exact size; the system rounds it up to a page.
        pinned: register it with the CUDA driver, so that the host goes on during copies to and from a device.

    Raises:
        RuntimeError: the system or the driver refuses the memory, or there is no CUDA device to pin it for.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapping = Mapping(-1, num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(f"Expected {format_bytes(num_bytes)} of host memory: {error}") from error
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    mapping.address, mapping.process = memory.data_ptr(), os.getpid()
    if pinned:  # the one place that calls the driver for it
        if status := int(torch.cuda.cudart().cudaHostRegister(mapping.address, num_bytes, 0)):
            raise RuntimeError(
                f"The driver refused to pin {format_bytes(num_bytes)} of host memory (CUDA error {status}). "
                "Check the limit of locked memory (ulimit -l) and the memory that is left on this node."
            )
        mapping.when_gone = unregister
    return memory


def unregister(address: int) -> None:
    """End the registration of a range, before its memory goes."""
    torch.cuda.cudart().cudaHostUnregister(address)


_LEAST_MAPPED = 1 << 20
_M_MMAP_THRESHOLD = -3
"""The name of the parameter in <malloc.h> of glibc."""


def return_freed_memory() -> None:
    """Let each allocation of 1 MiB or more go back to the system when it is freed, from now on.

    It holds for the whole process. A threshold that the user gave in the environment stays, and so does any
    other C library than glibc.
    """
    is_given = "MALLOC_MMAP_THRESHOLD_" in os.environ
    is_given |= "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    libc = ctypes.CDLL(None)
    if not is_given and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LEAST_MAPPED)


_PAGE = 4096
_CLASSES = 8
"""Classes of sizes between a power of two and the next, so that batches of many lengths share buffers. A
buffer is at most an eighth larger than asked for, or a page."""


class HostBuffer:
    """One buffer and the device work that uses it; see [Note: Buffers end after their copies].

    Args:
        memory: uint8, [size_class]; nobody else holds it or a view of it.
    """

    __slots__ = ("_process", "held", "last", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.held: Tensor | None = None
        """Memory of the device that goes no earlier than the buffer, or when somebody has waited for it."""
        self.last: Mark | None = None
        """The end of a copy from or to the memory; it lies after the ends of all earlier copies."""
        self._process = os.getpid()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # A forked process has no part in the device, nor in the registration of the memory.
        if self.last is not None and not is_ending() and self._process == os.getpid():
            self.last.synchronize()


def size_class(num_bytes: int) -> int:
    """Return the bytes of the buffer for `num_bytes`: a multiple of a page, up to an eighth more."""
    step = max(_PAGE, (1 << (max(num_bytes, 1).bit_length() - 1)) // _CLASSES)
    return -(-num_bytes // step) * step


class HostCopies:
    """Copy memory of one device to the host and back, each direction on its side stream.

    Host memory is in buffers by size class. Those in use and the free ones are never more than were in use at
    once.

    Args:
        memory: the memory of the rank, which counts the bytes of all buffers.
        streams: the side streams of the engine.
    """

    def __init__(self, memory: TierMemory, streams: Streams) -> None:
        self.device, self.streams, self._memory = memory.device, streams, memory
        self._free: list[HostBuffer] = []
        """The buffer that was given back last is at the end."""
        self._bytes_in_use = self._most_in_use = 0
        self.left: deque[tuple[HostBuffer, Mark | None]] = deque()
        """Buffers of dead copies, and the mark of each for which the compute stream has not waited yet.

        A buffer holds the memory of the device that is in use up to the mark. Dying copies fill this, which
        may interrupt anything: nothing else changes there.
        """

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of `size_class(num_bytes)`; the host waits for copies of buffers that go for it.

        Raises:
            RuntimeError: there is not so much memory.
        """
        size = size_class(num_bytes)
        buffer = next((one for one in reversed(self._free) if one.memory.nbytes == size), None)
        if buffer is not None:
            self._free.remove(buffer)
        self._most_in_use = max(self._most_in_use, self._bytes_in_use + size)
        while self._free and self._bytes_in_use + size + self._bytes_free > self._most_in_use:
            self._memory.staging_bytes -= self._free.pop(0).memory.nbytes
        if buffer is None:
            buffer = HostBuffer(self._memory.host(size))
            self._memory.staging_bytes += size
        self._bytes_in_use += size
        return buffer

    @property
    def _bytes_free(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._free)

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back, as `take` returned it."""
        self._bytes_in_use -= buffer.memory.nbytes
        self._free.append(buffer)

    def release_dead(self) -> None:
        """Take back the memory of copies that have died. Called on the compute stream."""
        while self.left:
            buffer, mark = self.left.popleft()
            if mark is not None:
                mark.wait()
            buffer.held = None
            self.give(buffer)


class HostCopy:
    """One copy on the host, made after all compute so far. Its memory may be on the device: still, or again.

    Args:
        source: uint8, [num_bytes]; nobody writes to it until `drop`.
        buffer: host memory for it, which `owner` has given.
        owner: the owner of the streams and the buffer.
    """

    __slots__ = ("_buffer", "_host", "_mark", "_near", "_owner")

    def __init__(self, source: Tensor, buffer: HostBuffer, owner: HostCopies) -> None:
        self._owner, self._buffer, self._host = owner, buffer, buffer.memory[: source.numel()]
        self._near: Tensor | None = source
        """The memory on the device: the source, or memory that it came back to."""
        self._mark: Mark | None = None
        """The end of the last copy, until compute waits for it."""
        self._copy(owner.streams.to_host, self._host, source)

    def _copy(self, stream: SideStream, target: Tensor, values: Tensor) -> None:
        with torch.no_grad(), stream.after_compute():
            target.copy_(values, non_blocking=True)
        self._mark = self._buffer.last = stream.mark()

    def fetch(self) -> None:
        """Start to copy the memory back, unless it is on the device or on its way.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        if self._near is None:
            self._near = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._owner.device)
            self._copy(self._owner.streams.to_device, self._near, self._host)

    def get(self) -> Tensor:
        """Return the memory on the device, uint8, [num_bytes]; compute waits until it is there.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        self.fetch()
        self._follow()
        assert self._near is not None, "it has been fetched"
        return self._near

    def drop(self) -> None:
        """Free the memory on the device, once compute has waited for the copy; the host keeps the values."""
        self._follow()
        self._near = None

    def _follow(self) -> None:
        if self._mark is not None:
            self._mark.wait()
            self._mark = None

    def __del__(self) -> None:
        self._buffer.held = None if self._mark is None else self._near
        self._owner.left.append((self._buffer, self._mark))
