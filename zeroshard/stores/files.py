"""The files of one rank on the nvme tier: space is reserved in them, read and written by a few threads.

    empty    -> Tensor            new space in the files, as a tensor; it is used again when the tensor goes
    write    -> FileTransfer      its stripes go to the threads, which write while the caller goes on
    read     -> FileTransfer

Direct I/O copies nothing: memory must begin at the same byte of a block as the values in the files do, and
memory of `host_memory` begins at a page. A transfer holds its memory until it is over, but does not protect
it: wait before you use it.

The bytes of an extent become stripes in files:

    padded bytes   |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---|- 4 -|
    file 0             0          2         4
    file 1             1          3

A stripe is what one thread reads or writes with one call. Each goes to the file with the least bytes, so
files take turns, and none is ever ahead of another by more than a stripe.

Values on the nvme tier rest as tensors over ranges of files, through the page cache of the system: whoever
reads or writes such a tensor reads or writes the files, one page at a time. Steps read and write ranges past
the page cache; the system keeps both views of a file equal as long as they take turns.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.plan.layout import round_up
from zeroshard.stores.host import Mapping, return_freed_memory
from zeroshard.stores.swapfile import PAGE, SwapFile


class Stripe(NamedTuple):
    """A part of an extent: a range of a file and the same number of bytes in memory."""

    file: int
    offset: int
    """Bytes from the beginning of the file."""
    start: int
    """Bytes from the beginning of the extent."""
    num_bytes: int


def stripe_size(padded: int, num_parts: int, least: int, most: int) -> int:
    """Return the bytes of the stripes of an extent.

    Args:
        padded: bytes of the extent.
        num_parts: the number of threads that should have something to do.
        least: bytes of the smallest stripe; a multiple of the alignment, as the result is.
        most: bytes of the largest stripe; a multiple of `least`.
    """
    return min(most, max(least, round_up(-(-padded // num_parts), least)))


def cut(padded: int, size: int, ends: Sequence[int]) -> tuple[Stripe, ...]:
    """Cut an extent into stripes after the present ends of the files.

    Args:
        padded: bytes of the extent.
        size: bytes of a stripe; the last one may be smaller.
        ends: for each file, the offset at which free space begins.
    """
    stripes, offsets = [], list(ends)
    for start in range(0, padded, size):
        file = offsets.index(min(offsets))
        num_bytes = min(size, padded - start)
        stripes.append(Stripe(file, offsets[file], start, num_bytes))
        offsets[file] += num_bytes
    return tuple(stripes)


_THREADS = 4
"""Threads that read and write, for each folder."""
LEAST_STRIPE = 1 << 20
MOST_STRIPE = 16 << 20


class FileTransfer:
    """A read or a write that runs while the caller goes on."""

    def __init__(self, futures: Sequence[Future[str]]) -> None:
        self._futures = futures
        """The messages of errors; "" where there was none."""

    def wait(self) -> None:
        """Wait until no thread uses the memory any more.

        Raises:
            RuntimeError: a part could not be read or written. The message names the folder; each further call
                raises it again.
        """
        if failure := self.join():
            raise RuntimeError(failure)

    def join(self) -> str:
        """Wait as `wait` does; return the message of the first error, or ""."""
        wait_for(self._futures)
        return next(filter(None, (future.result() for future in self._futures)), "")


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Space in the files of a `Swap`, for values of a fixed size."""

    stripes: tuple[Stripe, ...]
    writes: dict[int, FileTransfer] = field(default_factory=dict)
    """The last write of each range, by its first byte. After an error its values are lost."""


class Swap:
    """The files of one rank on the nvme tier: one in each folder, with the stripes of an extent in turns."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        """Files are opened for the first values.

        Args:
            folders: existing folders, on one disk each; none if no values will lie in files.
        """
        self._process = os.getpid()
        """A forked process has no part in the files."""
        self._folders, self._num_threads = folders, _THREADS * max(1, len(folders))
        # They end with this object. Nobody may wait for them, or start one, inside a garbage collection: it
        # may run in a thread that is just being started, under a lock of Python's own.
        self._threads = ThreadPoolExecutor(self._num_threads, "zeroshard-swap")
        self._files: list[SwapFile] = []
        """One in each folder; it ends at exit, or when neither this object nor a transfer uses it any more.
        """
        self._lock = threading.RLock()  # a garbage collection under it may free space
        self._free: dict[int, list[tuple[Stripe, ...]]] = defaultdict(list)
        self.mapped: dict[int, Extent] = {}
        """The extents under tensors of `empty` and their views, by the address of the storage."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the files, freed extents included."""
        return sum(file.end for file in self._files)

    def empty(self, num_bytes: int) -> Tensor:
        """Return new space as a tensor through the page cache, of uint8: [num_bytes], in whole blocks.

        The space is freed when nobody holds the tensor any more. Use tensor and transfers in turns.

        Raises:
            ValueError: a folder is not there, or may not be written to.
            RuntimeError: the disk is full. The message has the bytes that were asked for and that are free.
        """
        self._check_process()
        padded = round_up(num_bytes, PAGE)
        with self._lock:
            if not self._files:
                return_freed_memory()  # units that come from files and go are to keep no memory
                self._files = [SwapFile(Path(folder)) for folder in self._folders]
            stripes = self._free[padded].pop() if self._free[padded] else self._reserve(padded)
        ranges = [(self._files[s.file].descriptor, s.offset, s.num_bytes) for s in stripes]
        tensor = map_ranges(ranges, self._free_mapped)
        self.mapped[tensor.data_ptr()] = Extent(stripes)
        return tensor

    def _reserve(self, padded: int) -> tuple[Stripe, ...]:
        """Make the files longer for a new extent."""
        size = stripe_size(padded, self._num_threads, LEAST_STRIPE, MOST_STRIPE)
        stripes = cut(padded, size, [file.end for file in self._files])
        for number, file in enumerate(self._files):
            file.reserve(max((s.offset + s.num_bytes for s in stripes if s.file == number), default=0))
        return stripes

    def check(self, extent: Extent) -> None:
        """Check that the files have the values of an extent, before they are read through its tensor.

        Raises:
            RuntimeError: the last write has failed.
        """
        for write in list(extent.writes.values()):
            write.wait()

    def renew(self, extent: Extent) -> None:
        """Drop the errors of writes, since all values will be written through the tensor."""
        while extent.writes:
            extent.writes.popitem()[1].join()

    def _free_mapped(self, address: int) -> None:
        # A garbage collection calls this anywhere, while another thread may change the dict. No transfer is
        # under way: it would hold the tensor.
        extent = self.mapped.pop(address)
        with self._lock:
            self._free[sum(stripe.num_bytes for stripe in extent.stripes)].append(extent.stripes)

    def read(self, values: Tensor, into: Tensor) -> FileTransfer:
        """Start to read values past the page cache; waits for a write of this range that is under way.

        Args:
            values: a tensor of `empty`, or a range of one, which was written as such.
            into: as many bytes of memory, from the same byte of a block on.

        Raises:
            RuntimeError: the last write of the range has failed.
        """
        extent, start = self._place_of(values)
        if start in extent.writes:
            extent.writes[start].wait()
        return self._start(SwapFile.read, values, into)

    def write(
        self, values: Tensor, source: Tensor, is_ready: Callable[[], None] | None = None
    ) -> FileTransfer:
        """Start to write values past the page cache.

        A failed write leaves no values: `read` and `check` raise its error until a later write succeeds.

        Args:
            values: a tensor of `empty`, or a range of one, which no transfer uses.
            source: as many bytes of memory, from the same byte of a block on.
            is_ready: waits until the memory has the values; called in other threads.
        """
        extent, start = self._place_of(values)
        waits = [] if is_ready is None else [is_ready]
        transfer = self._start(SwapFile.write, values, source, *waits)
        if values.nbytes:  # a range of none may begin where another one does
            extent.writes[start] = transfer
        return transfer

    def _place_of(self, values: Tensor) -> tuple[Extent, int]:
        """The extent of values, and their first byte in it."""
        self._check_process()
        return self.mapped[values.untyped_storage().data_ptr()], int(values.storage_offset())

    def _start(
        self,
        call: Callable[[SwapFile, memoryview, int], None],
        values: Tensor,
        memory: Tensor,
        *before: Callable[[], None],
    ) -> FileTransfer:
        extent, start = self._place_of(values)
        view, futures = memory.detach().numpy().data, []
        for stripe in extent.stripes:
            first = max(start, stripe.start)
            last = min(start + values.nbytes, stripe.start + stripe.num_bytes)
            if first < last:
                part, offset = view[first - start : last - start], stripe.offset + first - stripe.start
                work = partial(call, self._files[stripe.file], part, offset)
                futures.append(self._threads.submit(_attempt, [*before, work], [values]))
        return FileTransfer(futures)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("Expected files of this process, got files of a parent process")


def _attempt(calls: list[Callable[[], None]], held: list[Tensor]) -> str:
    """Make calls, and return the message of the first error.

    Neither file, memory nor the space of `held` is held when the result is there. The error would hold them
    through its traceback. A thread holds its arguments a little longer than anybody waits for it: hence
    lists, which are emptied.
    """
    try:
        while calls:
            calls.pop(0)()
    except RuntimeError as error:
        return str(error)
    finally:
        calls.clear()
        held.clear()
    return ""


_MAP_FIXED = 0x10
"""mmap(2) on Linux: at the given address, in place of the mapping there; Python's mmap has no word for it."""
_FAILED = ctypes.c_void_p(-1).value


def map_ranges(ranges: Sequence[tuple[int, int, int]], when_gone: Callable[[int], None]) -> Tensor:
    """Return ranges of files, one after the other, as one tensor of uint8.

    Args:
        ranges: the descriptor of a file, the first byte and the number of bytes, in whole pages. The bytes
            exist: a read beyond the end of a file would end the process.
        when_gone: called with the address of the tensor when the last tensor over the mapping goes.

    Raises:
        RuntimeError: the system refuses.
    """
    size = sum(num_bytes for _, _, num_bytes in ranges)
    mapping = Mapping(-1, size)  # reserves addresses that lie side by side
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    at = memory.data_ptr()
    system_mmap = ctypes.CDLL(None, use_errno=True).mmap
    system_mmap.restype = ctypes.c_void_p
    system_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    for descriptor, offset, num_bytes in ranges:
        if system_mmap(at, num_bytes, access, kind, descriptor, offset) == _FAILED:
            raise RuntimeError(f"The system refused to map a file: {os.strerror(ctypes.get_errno())}")
        at += num_bytes
    mapping.when_gone, mapping.address, mapping.process = when_gone, memory.data_ptr(), os.getpid()
    return memory


def advise(tensor: Tensor, advice: int) -> None:
    """Say how the pages of a contiguous mapped tensor will be used; `madvise` has the words.

    Args:
        tensor: a tensor over a mapping of files; after MADV_DONTNEED another tensor would lose its values.
        advice: a constant of `mmap`.
    """
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
