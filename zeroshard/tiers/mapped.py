"""Ranges of files as tensors, through the page cache of the system.

This is how values on the nvme tier rest: whoever reads or writes such a tensor reads or writes the files, one
page at a time. Steps read and write whole extents past the page cache; the system keeps both views of a file
equal as long as they take turns.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MAP_FIXED = 0x10
"""mmap(2) on Linux: at the given address, in place of the mapping there; Python's mmap has no word for it."""
_FAILED = ctypes.c_void_p(-1).value


class Range(NamedTuple):
    """Bytes of an open file, in whole pages."""

    descriptor: int
    offset: int
    num_bytes: int


class _Mapping(mmap.mmap):
    """The mapping under a tensor; it tells when nobody holds the tensor any more."""

    when_gone: Callable[[], None] = staticmethod(lambda: None)
    process = 0

    def __del__(self) -> None:
        if self.process == os.getpid():
            self.when_gone()


def map_ranges(ranges: Sequence[Range], when_gone: Callable[[], None]) -> Tensor:
    """Return ranges of files, one after the other, as one tensor of uint8.

    Args:
        ranges: ranges whose bytes exist; a read behind the end of a file would end the process.
        when_gone: called when the last tensor over the mapping goes.

    Raises:
        RuntimeError: the system refuses.
    """
    size = sum(part.num_bytes for part in ranges)
    mapping = _Mapping(-1, size)  # reserves addresses that lie side by side
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    address = memory.data_ptr()
    system_mmap = ctypes.CDLL(None, use_errno=True).mmap
    system_mmap.restype = ctypes.c_void_p
    at = address
    for part in ranges:
        found = system_mmap(
            ctypes.c_void_p(at),
            ctypes.c_size_t(part.num_bytes),
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | _MAP_FIXED,
            part.descriptor,
            ctypes.c_long(part.offset),
        )
        if found == _FAILED:
            raise RuntimeError(f"The system refused to map a file: {os.strerror(ctypes.get_errno())}")
        at += part.num_bytes
    mapping.when_gone, mapping.process = when_gone, os.getpid()
    return memory


def let_go(tensor: Tensor) -> None:
    """Take the pages of a mapped tensor out of this process; the files keep the values.

    Args:
        tensor: a contiguous tensor over a mapping; other tensors would lose their values.
    """
    _advise(tensor, mmap.MADV_DONTNEED)


def read_ahead(tensor: Tensor) -> None:
    """Let the system read the pages of a contiguous mapped tensor, beside the caller."""
    _advise(tensor, mmap.MADV_WILLNEED)


def _advise(tensor: Tensor, advice: int) -> None:
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
