"""A swap file has no name, so that it ends with its process; errors of the system are told."""

import errno
import mmap
import os
import resource
from contextlib import contextmanager

import pytest

from tests.stores.tiers import swap_files
from zeroshard.stores.swapfile import PAGE, SwapFile, check_folder


def test_a_file_has_no_name_and_its_space_goes_though_a_forked_process_has_it_open(tmp_path):
    file = SwapFile(tmp_path)
    file.reserve(3 * PAGE)
    assert not list(tmp_path.iterdir())
    assert list(swap_files(tmp_path).values()) == [3 * PAGE]
    descriptor = os.dup(file.descriptor)  # as in a child
    file.close()
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)
    assert not swap_files(tmp_path)


@contextmanager
def limited(num_bytes):
    """Files may not grow beyond this size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [1, PAGE - 1, 3 * PAGE])
def test_a_limit_of_the_system_is_told_and_changes_nothing(tmp_path, size):
    file = SwapFile(tmp_path)
    file.reserve(PAGE)
    message = rf"{file.folder}: could not reserve 16\.0 KiB .*: File too large"
    with limited(PAGE + size), pytest.raises(RuntimeError, match=message):
        file.reserve(5 * PAGE)
    assert file.end == os.fstat(file.descriptor).st_size == PAGE
    file.close()


def test_a_write_beyond_a_limit_of_the_system_is_told(tmp_path):
    file = SwapFile(tmp_path)
    file.reserve(4 * PAGE)
    message = r"could not write 16384 bytes at 0: File too large\. Values .* Check"
    with limited(2 * PAGE), pytest.raises(RuntimeError, match=message):
        file.write(memoryview(mmap.mmap(-1, 4 * PAGE)), 0)
    file.close()


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_path_that_is_no_folder_is_an_error_of_the_user(tmp_path, path):
    (tmp_path / "file").touch()
    for refuse in (check_folder, lambda folder: SwapFile(folder)):
        with pytest.raises(ValueError, match=rf"offload\.nvme_path: expected an existing folder .*{path}'"):
            refuse(tmp_path / path)


def open_without_direct(open_, flag):
    def refuse(path, flags, *args):
        if flags & flag:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_(path, flags, *args)

    return refuse


def test_files_pass_through_the_page_cache_where_there_is_no_direct_io(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", open_without_direct(os.open, os.O_DIRECT))
    with pytest.warns(UserWarning, match=r"has no direct I/O \(Invalid argument\), so reads .* page cache"):
        file = SwapFile(tmp_path)
    file.reserve(PAGE)
    source, into = mmap.mmap(-1, PAGE), mmap.mmap(-1, PAGE)
    source[:5] = b"bytes"
    file.write(memoryview(source), 0)
    file.read(memoryview(into), 0)
    assert into[:] == source[:]
    file.close()
