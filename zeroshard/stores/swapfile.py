"""One file of the nvme tier: reserved, locked, read and written past the page cache.

    <nvme_path>/zeroshard-<user>-<host>-<process>-rank<rank>-<random>.swap

The process holds the kernel's lock (flock) on its file for as long as it lives. So a file whose lock is free
belongs to a process that was killed; whoever opens the folder next removes it. The lock decides alone: a
process id may be used again or belong to another container. An unlinked file would need none of this, but
nobody could see what fills the disk.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import shutil
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from zeroshard.internals.warn import warn_user
from zeroshard.tables import format_bytes

SETTING = "offload.nvme_path"
_EXPECTED = f"{SETTING}: expected an existing folder that this process may write to"
_SUFFIX = ".swap"
_REMEDY = f"Check this disk, free space there, or set {SETTING} to a folder on another."
BLOCK = mmap.PAGESIZE
"""Bytes of a block of direct I/O: a page, which is a multiple of the blocks of drives and file systems."""


class SwapFile:
    """A file that this process alone uses. Calls of `read` and `write` may come from any thread."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Create the file.

        Args:
            folder: an existing folder on the disk.
            rank: for the name of the file.

        Raises:
            ValueError: the folder is not there or no folder, may not be written to, or has no file locks.
        """
        remove_leftovers(folder)  # first, as they may fill the disk
        name = f"{platform.node()[:64]}-{os.getpid()}-rank{rank}-{uuid4().hex[:8]}{_SUFFIX}"
        self.path = folder / f"{_prefix()}{name}"
        try:
            self.descriptor = self._data = _create_locked(self.path)
        except OSError as error:
            raise ValueError(f"{_EXPECTED}, got {str(folder)!r}: {error.strerror}") from error
        descriptors = [self.descriptor]
        self.remove = weakref.finalize(self, _remove, self.path, descriptors, os.getpid())
        """Gives the space back and removes the file."""
        try:
            descriptors.append(os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT))
            os.pwrite(descriptors[-1], mmap.mmap(-1, BLOCK), BLOCK)
            os.ftruncate(self.descriptor, 0)
            self._data = descriptors[-1]
            """For data: the descriptor of the lock, through the page cache, where there is no direct I/O."""
        except OSError as error:  # perhaps it asks for larger blocks
            warn_user(
                f"{SETTING}: the file system of {folder} has no direct I/O ({error.strerror}), so reads and "
                "writes pass through the page cache: slower, and the system uses more memory."
            )
        self.end = 0
        """Bytes that are reserved."""
        self._damage = ""

    def reserve(self, end: int) -> None:
        """Make the file `end` bytes long, with blocks on the disk for all of them.

        Raises:
            RuntimeError: there is not enough space, and the file is as before; or the file was damaged.
        """
        if end <= self.end:
            return
        self.check()
        try:
            os.posix_fallocate(self.descriptor, self.end, end - self.end)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.end)
            more, free = end - self.end, shutil.disk_usage(self.path.parent).free
            raise RuntimeError(
                f"{self.path}: could not reserve {format_bytes(more)} ({more} bytes) more: {error.strerror}. "
                f"The disk has {format_bytes(free)} free, this file has {format_bytes(self.end)}. {_REMEDY}"
            ) from error
        self.end = end

    def read(self, into: memoryview, offset: int) -> None:
        """Read as many bytes as `into` has.

        Raises:
            RuntimeError: the bytes are not there any more, or the disk fails.
        """
        self._move("read", os.preadv, into, offset)

    def write(self, source: memoryview, offset: int) -> None:
        """Write all bytes of `source`.

        Raises:
            RuntimeError: the file was removed or truncated, or the disk is full or fails.
        """
        self._move("write", os.pwritev, source, offset)

    def _move(
        self, verb: str, call: Callable[[int, list[memoryview], int], int], memory: memoryview, offset: int
    ) -> None:
        """Move whole blocks past the page cache, and what is left at both ends through it."""
        done, size = 0, len(memory)
        head = min(-offset % BLOCK, size)
        tail = size - (size - head) % BLOCK
        ranges = (head, self.descriptor, 1), (tail, self._data, BLOCK), (size, self.descriptor, 1)
        for end, descriptor, block in ranges:
            while done < end:
                self.check()
                try:
                    moved = call(descriptor, [memory[done:end]], offset + done)
                except OSError as error:
                    raise RuntimeError(
                        f"{self.path}: could not {verb} {size} bytes at {offset}: {error.strerror}. {_REMEDY}"
                    ) from error
                moved -= moved % block  # the next call must begin at a block, too
                if not moved:
                    raise RuntimeError(
                        f"{self.path}: expected to {verb} {size} bytes at {offset}, got {done}. "
                        f"{self._describe_loss()}"
                    )
                done += moved

    def check(self) -> None:
        """Raise a RuntimeError if somebody has removed or truncated the file; its values are lost for good.

        A write beyond the new end would otherwise make the file long again, with zeros before it.
        """
        end = self.end  # read first: another thread makes the file longer before it notes the new end
        status = os.fstat(self.descriptor)
        if status.st_nlink == 0:
            self._damage = "the file was removed while it was in use"
        elif status.st_size < end and not self._damage:
            self._damage = f"expected {end} bytes, got {status.st_size}: the file was truncated"
        if self._damage:
            raise RuntimeError(f"{self.path}: {self._damage}. {self._describe_loss()}")

    def _describe_loss(self) -> str:
        return (
            "Values in it are lost. Find what removes or truncates files in this folder, "
            "then go on from the last checkpoint."
        )


def _remove(path: Path, descriptors: Sequence[int], process: int) -> None:
    """Remove a file: on request, at exit, or in a garbage collection, in any thread."""
    if process != os.getpid():
        return
    with suppress(OSError):
        os.ftruncate(descriptors[0], 0)  # a forked process that still has it open holds no space
    with suppress(OSError):
        path.unlink()
    for descriptor in descriptors:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Raise a ValueError unless there is such a folder: a new one may lie on another disk than was meant."""
    if not folder.is_dir():
        reason = "it is no folder" if folder.exists() else "it does not exist"
        raise ValueError(f"{_EXPECTED}, got {str(folder)!r}: {reason}")


def _prefix() -> str:
    """The beginning of the names of this user's files."""
    return f"zeroshard-{os.getuid()}-"


def _create_locked(path: Path) -> int:
    """Create a file and lock it; return its descriptor.

    Raises:
        OSError: the folder is not there or cannot be written to, or its file system has no locks.
    """
    unlocked = path.with_suffix(".new")  # nobody takes this one for a leftover
    # A write waits for the disk: an error of the page cache would show later, or nowhere.
    descriptor = os.open(unlocked, os.O_RDWR | os.O_DSYNC | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        os.close(descriptor)
        unlocked.unlink()
        raise OSError(error.errno, f"its file system has no file locks ({error.strerror})") from error
    unlocked.rename(path)
    return descriptor


def remove_leftovers(folder: Path) -> None:
    """Remove this user's files of processes that were killed, with one warning about all of them."""
    count = num_bytes = 0
    for path in sorted(folder.glob(f"{_prefix()}*{_SUFFIX}")):
        with suppress(OSError):  # it is locked, or somebody else has removed it
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(descriptor)
                path.unlink()
                count, num_bytes = count + 1, num_bytes + 512 * status.st_blocks
            finally:
                os.close(descriptor)
    if num_bytes:
        warn_user(
            f"{folder}: removed {format_bytes(num_bytes)} in {count} file(s) of processes that were killed"
        )
