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

A pool keeps host memory for values of the device until the next step: to pin memory is slow. A buffer is
taken for a copy and given back later, perhaps while the device has not come to its last copy yet. That is
safe, as the next copy into the buffer is queued after that one.

[Note: Buffers end after their copies] Pinned memory of torch would wait for such copies by itself, but torch
rounds it up to a power of two. The memory here has the exact size, and the system takes it back with the last
tensor over it, whatever the device still does there. So each buffer notes the end of its last copy, and the
host waits for that before the memory goes: when the pool drops a buffer, when the engine closes, and when the
garbage collector finds it.

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

from zeroshard.comm.streams import Mark, Streams
from zeroshard.tables import format_bytes

if TYPE_CHECKING:
    from zeroshard.tiers.places import TierMemory


class _Mapping(mmap.mmap):
    """Anonymous memory; it is unregistered before it is unmapped."""

    is_registered = False
    address = 0
    process = 0
    """The id of the process that made it; a forked one has no part in its registration."""

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.is_registered and not is_ending() and self.process == os.getpid():
            unregister(self.address)


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
        mapping = _Mapping(-1, num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(f"Expected {format_bytes(num_bytes)} of host memory: {error}") from error
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if pinned:
        register(memory.data_ptr(), num_bytes)
    mapping.address, mapping.is_registered, mapping.process = memory.data_ptr(), pinned, os.getpid()
    return memory


def register(address: int, num_bytes: int) -> None:
    """Pin a range of host memory: the one place that calls the driver for it.

    Raises:
        RuntimeError: there is no CUDA device, or the driver refuses.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    if status:
        raise RuntimeError(
            f"The driver refused to pin {format_bytes(num_bytes)} of host memory (CUDA error {status}). "
            "Check the limit of locked memory (ulimit -l) and the memory that is left on this node."
        )


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

    __slots__ = ("_last", "_process", "held", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.held: tuple[Tensor, ...] = ()
        """Memory of the device that goes no earlier than the buffer, or when somebody has waited for it."""
        self._last: Mark | None = None
        self._process = os.getpid()

    def in_use_until(self, mark: Mark) -> None:
        """Note the end of a copy from or to the memory; it lies after the ends of all earlier copies."""
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
        memory: the memory of the rank, which counts the bytes of all buffers.
    """

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory
        self._free: list[HostBuffer] = []
        """The buffer that was given back last is at the end."""
        self._bytes = self._bytes_in_use = self._most_in_use = 0

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of `size_class(num_bytes)`; the host waits for copies of buffers that go for it.

        Raises:
            RuntimeError: there is not so much memory.
        """
        size = size_class(num_bytes)
        buffer = next((one for one in reversed(self._free) if one.memory.nbytes == size), None)
        if buffer is not None:
            self._free.remove(buffer)
        new = size if buffer is None else 0
        self._most_in_use = max(self._most_in_use, self._bytes_in_use + size)
        while self._free and self._bytes + new > self._most_in_use:
            self._count(-self._free.pop(0).memory.nbytes)
        if buffer is None:
            try:
                buffer = HostBuffer(self._memory.host(size))
            except RuntimeError as error:
                raise RuntimeError(
                    f"no {size} bytes of host memory for offloaded values, which have {self._bytes} bytes: "
                    f"offload less, or use smaller micro-batches ({str(error).splitlines()[0]})"
                ) from error
            self._count(size)
        self._bytes_in_use += size
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back, as `take` returned it."""
        self._bytes_in_use -= buffer.memory.nbytes
        self._free.append(buffer)

    def _count(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        self._memory.staging_bytes += num_bytes


class HostCopies:
    """Copy memory of one device to the host and back, each direction on its side stream.

    Args:
        memory: the memory of the rank.
        streams: the side streams of the engine.
    """

    def __init__(self, memory: TierMemory, streams: Streams) -> None:
        self.device, self.streams, self._pool = memory.device, streams, HostPool(memory)
        self.left: deque[tuple[HostBuffer, list[Mark]]] = deque()
        """Buffers of dead copies, and the marks for which the compute stream has not waited yet.

        A buffer holds the memory of the device that is in use up to these. Dying copies fill this, which may
        interrupt anything: nothing else changes there.
        """

    def copy(self, source: Tensor) -> HostCopy:
        """Start to copy memory to the host, after all compute so far.

        Args:
            source: uint8, [num_bytes]; nobody writes to it until `HostCopy.release`.

        Raises:
            RuntimeError: the host has not enough memory.
        """
        return HostCopy(source, self._pool.take(source.numel()), self)

    def release_dead(self) -> None:
        """Take back the memory of copies that have died. Called on the compute stream."""
        while self.left:
            buffer, marks = self.left.popleft()
            for mark in marks:
                mark.wait()
            buffer.held = ()
            self._pool.give(buffer)


class HostCopy:
    """One copy on the host. Its memory may be on the device as well: still, or again."""

    __slots__ = ("_arrived", "_back", "_buffer", "_num_bytes", "_owner", "_sent", "_source")

    def __init__(self, source: Tensor, buffer: HostBuffer, owner: HostCopies) -> None:
        self._source: Tensor | None = source
        self._buffer, self._owner, self._num_bytes = buffer, owner, source.numel()
        self._back: Tensor | None = None
        self._arrived: Mark | None = None
        """The end of the copy to the device, until compute waits for it."""
        self._sent: Mark | None = None
        """The end of the copy to the host, until compute waits for it."""
        to_host = owner.streams.to_host
        with torch.no_grad(), to_host.after_compute():
            self._host.copy_(source, non_blocking=True)
        self._sent = to_host.mark()
        buffer.in_use_until(self._sent)

    @property
    def _host(self) -> Tensor:
        return self._buffer.memory[: self._num_bytes]

    def release(self) -> None:
        """Free the source, once compute has waited for the copy."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = self._source = None

    def fetch(self) -> None:
        """Start to copy the memory back, unless it is on the device or on its way.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        if self._source is not None or self._back is not None:
            return
        back = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._owner.device)
        to_device = self._owner.streams.to_device
        with torch.no_grad(), to_device.after_compute():
            back.copy_(self._host, non_blocking=True)
        self._back, self._arrived = back, to_device.mark()
        self._buffer.in_use_until(self._arrived)

    def get(self) -> Tensor:
        """Return the memory on the device, uint8, [num_bytes]; compute waits until it is there.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        self.fetch()
        if self._arrived is not None:
            self._arrived.wait()
            self._arrived = None
        memory = self._back if self._source is None else self._source
        assert memory is not None, "it has been fetched"
        return memory

    def drop(self) -> None:
        """Free the memory on the device that came back; the copy on the host stays."""
        if self._arrived is not None:
            self._arrived.wait()
        self._arrived = self._back = None

    def __del__(self) -> None:
        marks = [mark for mark in (self._sent, self._arrived) if mark is not None]
        held = (self._source, self._back) if marks else ()
        self._buffer.held = tuple(memory for memory in held if memory is not None)
        self._owner.left.append((self._buffer, marks))
