"""One file of the nvme tier: reserved, read and written past the page cache.

The file loses its name as soon as it is open. So nobody removes or truncates it while it is in use, and the
system takes its space back when the process ends, even by a kill. `lsof +L1` lists such files.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from zeroshard.internals.warn import warn_user
from zeroshard.tables import format_bytes

SETTING = "offload.nvme_path"
_REMEDY = f"Check this disk, free space there, or set {SETTING} to a folder on another."
PAGE = mmap.PAGESIZE
"""Bytes of a block of direct I/O: a page, which is a multiple of the blocks of drives and file systems."""


class SwapFile:
    """A file that this process alone uses. Calls of `read` and `write` may come from any thread."""

    def __init__(self, folder: Path) -> None:
        """Create the file.

        Args:
            folder: an existing folder on the disk.

        Raises:
            ValueError: the folder is not there or no folder, or may not be written to.
        """
        check_folder(folder)
        self.folder, path, flags = folder, folder / f"zeroshard-{uuid4().hex}.swap", os.O_RDWR | os.O_CLOEXEC
        # A write waits for the disk: an error of the page cache would show later, or nowhere.
        new = os.open(path, flags | os.O_DSYNC | os.O_CREAT | os.O_EXCL, 0o600)
        self.descriptor = self._data = new
        descriptors = [new]
        self.close = weakref.finalize(self, _close, descriptors, os.getpid())
        """Gives the space back."""
        try:
            descriptors.append(os.open(path, flags | os.O_DIRECT))
            os.pwrite(descriptors[-1], mmap.mmap(-1, PAGE), PAGE)
            os.ftruncate(new, 0)
            self._data = descriptors[-1]
            """For data: the other descriptor, through the page cache, where there is no direct I/O."""
        except OSError as error:  # perhaps it asks for larger blocks
            warn_user(
                f"{SETTING}: the file system of {folder} has no direct I/O ({error.strerror}), so reads and "
                "writes pass through the page cache: slower, and the system uses more memory."
            )
        finally:
            path.unlink()
        self.end = 0
        """Bytes that are reserved."""

    def reserve(self, end: int) -> None:
        """Make the file `end` bytes long, with blocks on the disk for all of them.

        Raises:
            RuntimeError: there is not enough space, and the file is as before.
        """
        if end <= self.end:
            return
        try:
            os.posix_fallocate(self.descriptor, self.end, end - self.end)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.end)
            more, free = end - self.end, shutil.disk_usage(self.folder).free
            raise RuntimeError(
                f"{self.folder}: could not reserve {format_bytes(more)} ({more} bytes) more: "
                f"{error.strerror}. The disk has {format_bytes(free)} free, this file has "
                f"{format_bytes(self.end)}. {_REMEDY}"
            ) from error
        self.end = end

    def read(self, into: memoryview, offset: int) -> None:
        """Read as many bytes as `into` has.

        Raises:
            RuntimeError: the disk fails; the message names its folder.
        """
        self._move("read", os.preadv, into, offset)

    def write(self, source: memoryview, offset: int) -> None:
        """Write all bytes of `source`.

        Raises:
            RuntimeError: the disk fails; the message names its folder.
        """
        self._move("write", os.pwritev, source, offset)

    def _move(
        self, verb: str, call: Callable[[int, list[memoryview], int], int], memory: memoryview, offset: int
    ) -> None:
        """Move whole blocks past the page cache, and what is left at both ends through it."""
        done, size = 0, len(memory)
        head = min(-offset % PAGE, size)
        tail = size - (size - head) % PAGE
        ranges = (head, self.descriptor, 1), (tail, self._data, PAGE), (size, self.descriptor, 1)
        for end, descriptor, block in ranges:
            while done < end:
                try:
                    moved = call(descriptor, [memory[done:end]], offset + done)
                    moved -= moved % block  # the next call must begin at a block, too
                    if not moved:
                        raise OSError(errno.EIO, f"it ends after {done} bytes")
                except OSError as error:
                    raise RuntimeError(
                        f"{self.folder}: could not {verb} {size} bytes at {offset}: {error.strerror}. "
                        f"Values in it are lost. {_REMEDY} Then go on from the last checkpoint."
                    ) from error
                done += moved


def _close(descriptors: Sequence[int], process: int) -> None:
    """End a file: on request, at exit, or in a garbage collection, in any thread."""
    if process != os.getpid():
        return
    with suppress(OSError):
        os.ftruncate(descriptors[0], 0)  # a forked process that still has it open holds no space
    for descriptor in descriptors:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Raise a ValueError unless there is such a folder: a new one may lie on another disk than was meant."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(
            f"{SETTING}: expected an existing folder that this process may write to, got {str(folder)!r}"
        )
