"""Host memory of exactly the size that is asked for, pinned or not.

Pinned memory of torch is rounded up to a power of two, so 65 GB of optimizer states would take 128 GB. Here
memory is mapped, and registered with the driver where it is to be pinned. The mapping is shared: the children
of a fork (workers of a data loader) then refer to the same pages. A private mapping would be copied page by
page while they live, as training writes to it, and a pinned one at once. A shared mapping has no huge pages
unless the system forces them, so nothing is resident beyond the pages that were asked for.

The heap of the C library, which holds tensors on the CPU: freed ones go back to the system.

glibc maps a large allocation by itself at first, and unmaps it when it is freed. With each one that is freed,
the size from which it does so rises, up to 32 MiB. From then on smaller ones lie in the heap, among small
allocations that stay, and their memory is resident for good. A run whose states are in files allocates and
frees a unit all the time, and would keep many times the memory that it needs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.tables import format_bytes


class HeldBytes(NamedTuple):
    """Bytes of the memory from `host_memory` that this process holds."""

    host: int
    """All of it."""
    pinned: int
    """The part that is pinned."""


_lock = threading.RLock()  # a garbage collection inside of it may free memory, and count too
_held = HeldBytes(0, 0)


def held_bytes() -> HeldBytes:
    """Return the bytes of the memory from `host_memory` that this process holds now."""
    return _held


def _count(host: int, *, pinned: bool) -> None:
    global _held
    with _lock:
        _held = HeldBytes(_held.host + host, _held.pinned + host * pinned)


class _Mapping(mmap.mmap):
    """Anonymous memory; it is counted, and unregistered before it is unmapped."""

    num_bytes = 0
    is_registered = False
    address = 0
    process = 0
    """The id of the process that made it; a forked one has no part in its registration."""

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending() and self.process == os.getpid():
            if self.is_registered:
                unregister(self.address)
            _count(-self.num_bytes, pinned=self.is_registered)


def host_memory(num_bytes: int, pinned: bool) -> Tensor:
    """Return memory of zeros on the host: [num_bytes] of uint8, its first byte at the start of a page.

    The memory goes back to the system with the last tensor that refers to it. A copy between device and
    pinned memory does not keep it: hold the tensor until the copy is over.

    Args:
        num_bytes: the exact size; the system rounds it up to a page.
        pinned: register it with the CUDA driver, so that copies to and from a device run beside the host.

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
    mapping.address, mapping.num_bytes = memory.data_ptr(), num_bytes
    mapping.is_registered, mapping.process = pinned, os.getpid()
    _count(num_bytes, pinned=pinned)
    return memory


def register(address: int, num_bytes: int) -> None:
    """Pin a range of host memory: the one place that calls the driver for it.

    Raises:
        RuntimeError: there is no CUDA device, or the driver refuses.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("Expected a CUDA device to pin host memory for, got none")
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
