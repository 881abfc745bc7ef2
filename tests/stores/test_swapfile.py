"""A swap file belongs to a live process: it is locked, and removed by others only after a kill."""

import errno
import fcntl
import mmap
import os
import resource
import signal
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from zeroshard.stores.swapfile import BLOCK, SwapFile, check_folder


@contextmanager
def another_process(folder, num_bytes):
    """A process that holds a file in `folder`: yields its id and the path; it is killed at the end."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        file = SwapFile(folder, rank=1)
        file.reserve(num_bytes)
        os.write(writer, os.fsencode(file.path))
        signal.pause()
    try:
        yield process, Path(os.fsdecode(os.read(reader, 4096)))
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reader)
        os.close(writer)


def test_the_file_of_a_killed_process_is_removed_by_the_next_one_with_one_warning(tmp_path):
    with another_process(tmp_path, 3 * BLOCK) as (process, path):
        assert f"-{process}-rank1-" in path.name
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            SwapFile(tmp_path, 0).remove()
        assert path.exists()
    assert path.exists()
    with pytest.warns(
        UserWarning, match=r"removed 12\.0 KiB in 1 file\(s\) of processes that were killed"
    ) as told:
        file = SwapFile(tmp_path, 0)
    assert len(told) == 1
    assert list(tmp_path.iterdir()) == [file.path]
    file.remove()


def test_only_swap_files_are_removed(tmp_path):
    (tmp_path / "notes.swap").write_text("mine")
    (tmp_path / "target").write_text("mine")
    (tmp_path / f"zeroshard-{os.getuid()}-x-1-rank0-0.swap").symlink_to(tmp_path / "target")
    SwapFile(tmp_path, 0).remove()
    assert (tmp_path / "notes.swap").exists()
    assert (tmp_path / "target").exists()


def test_a_file_that_is_not_locked_yet_is_no_leftover(tmp_path, monkeypatch):
    flock, others = fcntl.flock, []

    def late(descriptor, operation):
        if not others:  # another process opens the folder
            others.append(None)
            others[0] = SwapFile(tmp_path, 1)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    file = SwapFile(tmp_path, 0)
    assert sorted(tmp_path.iterdir()) == sorted([file.path, others[0].path])
    file.remove()
    others[0].remove()


@contextmanager
def limited(num_bytes):
    """Files may not grow beyond this size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [1, BLOCK - 1, 3 * BLOCK])
def test_a_limit_of_the_system_is_told_and_changes_nothing(tmp_path, size):
    file = SwapFile(tmp_path, 0)
    file.reserve(BLOCK)
    message = rf"{file.path}: could not reserve 16\.0 KiB .*: File too large"
    with limited(BLOCK + size), pytest.raises(RuntimeError, match=message):
        file.reserve(5 * BLOCK)
    assert file.end == file.path.stat().st_size == BLOCK
    file.remove()


def test_a_write_beyond_a_limit_of_the_system_is_told(tmp_path):
    file = SwapFile(tmp_path, 0)
    file.reserve(4 * BLOCK)
    message = r"could not write 16384 bytes at 0: File too large\. Check"
    with limited(2 * BLOCK), pytest.raises(RuntimeError, match=message):
        file.write(memoryview(mmap.mmap(-1, 4 * BLOCK)), 0)
    file.remove()


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_path_that_is_no_folder_is_an_error_of_the_user(tmp_path, path):
    (tmp_path / "file").touch()
    for refuse in (check_folder, lambda folder: SwapFile(folder, 0)):
        with pytest.raises(ValueError, match=rf"offload\.nvme_path: expected an existing folder .*{path}'"):
            refuse(tmp_path / path)


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, code):
    def refuse(descriptor, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match="has no file locks"):
        SwapFile(tmp_path, 0)
    assert not list(tmp_path.iterdir())


def open_without_direct(open_, flag):
    def refuse(path, flags, *args):
        if flags & flag:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_(path, flags, *args)

    return refuse


def test_files_pass_through_the_page_cache_where_there_is_no_direct_io(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", open_without_direct(os.open, os.O_DIRECT))
    with pytest.warns(UserWarning, match=r"has no direct I/O \(Invalid argument\), so reads .* page cache"):
        file = SwapFile(tmp_path, 0)
    file.reserve(BLOCK)
    source, into = mmap.mmap(-1, BLOCK), mmap.mmap(-1, BLOCK)
    source[:5] = b"bytes"
    file.write(memoryview(source), 0)
    file.read(memoryview(into), 0)
    assert into[:] == source[:]
    file.remove()
