"""The heap of the C library, which holds tensors on the CPU: freed ones go back to the system.

glibc maps a large allocation by itself at first, and unmaps it when it is freed. With each one that is freed,
the size from which it does so rises, up to 32 MiB. From then on smaller ones lie in the heap, among small
allocations that stay, and their memory is resident for good. A run whose states are in files allocates and
frees a unit all the time, and would keep many times the memory that it needs.
"""

from __future__ import annotations

import ctypes
import os

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
