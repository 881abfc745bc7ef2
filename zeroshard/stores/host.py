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

[Note: Buffers end after their copies] Pinned memory of torch would wait for such copies by itself, but torch
rounds it up to a power of two. The memory here has the exact size, and the system takes it back with the last
tensor over it, whatever the device still does there. So each buffer notes the end of its last copy, and the
host waits for that before the memory goes: when a free buffer is dropped, when the engine closes, and when
the garbage collector finds it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from zeroshard.comm.streams import Mark
from zeroshard.tables import format_bytes


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


class HostBuffer:
    """One buffer and the device work that uses it; see [Note: Buffers end after their copies].

    Args:
        memory: uint8, [num_bytes]; nobody else holds it or a view of it.
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
