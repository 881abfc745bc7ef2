"""Places in files keep their bytes; what goes wrong is one error for whoever waits, and stops nobody else."""

import errno
import itertools
import os
import threading
import time
from contextlib import contextmanager
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.stores.tiers import swap_files
from zeroshard.stores import files
from zeroshard.stores.files import Swap, cut, stripe_size
from zeroshard.stores.host import host_memory

BLOCK = 4096


@pytest.fixture
def swap(tmp_path):
    with_small_stripes = Swap([tmp_path])
    yield with_small_stripes
    close(with_small_stripes)


def close(swap):
    """Wait for all transfers and end the files, whoever holds them."""
    swap._threads.shutdown(wait=True)
    for file in swap._files:
        file.close()


@contextmanager
def opened(folders):
    swap = Swap(folders)
    yield swap
    close(swap)


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch):
    """An place of some blocks has several stripes."""
    monkeypatch.setattr(files, "LEAST_STRIPE", BLOCK)
    monkeypatch.setattr(files, "MOST_STRIPE", 2 * BLOCK)


def memory_of(place, seed=None):
    """Memory for a place, with random bytes if there is a seed."""
    lead = place.storage_offset() % BLOCK
    memory = host_memory(lead + place.nbytes, pinned=False)[lead:]
    if seed is not None:
        memory.random_(generator=torch.Generator().manual_seed(seed))
    return memory


def content_of(swap, place):
    memory = memory_of(place)
    swap.read(place, memory).wait()
    assert torch.equal(place, memory)
    return memory


def extent_of(swap, place):
    return swap.mapped[place.untyped_storage().data_ptr()]


SIZES = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 9 * BLOCK + 17])
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
ACTS = st.lists(
    st.tuples(st.sampled_from(["allocate", "write", "free"]), SIZES, st.integers(0, 7)), max_size=20
)


@settings(max_examples=25, suppress_health_check=UNCHECKED)
@given(acts=ACTS, num_folders=st.integers(1, 3))
def test_every_place_keeps_the_bytes_that_were_written_last(tmp_path, acts, num_folders):
    folders = [tmp_path / str(number) for number in range(num_folders)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    with opened(folders) as swap:
        places = follow(swap, acts)
        for place, values in places:
            if values is not None:
                assert torch.equal(content_of(swap, place), values)
        sizes = [*swap_files(tmp_path).values()]
        assert (len(sizes), sum(sizes)) == (num_folders * bool(acts), swap.num_bytes)
    assert not swap_files(tmp_path)


def is_over(transfer):
    """True when no thread uses the memory any more."""
    return all(future.done() for future in transfer._futures)


def follow(swap, acts):
    """Allocate, write and free; return the places, each with its values, None before a write."""
    expected, transfers = [], []
    for number, (act, num_bytes, which) in enumerate(acts):
        if act == "allocate" or not expected:
            expected.append((swap.empty(num_bytes + 1), None))
            continue
        place, _ = expected.pop(which % len(expected))
        if act == "write":
            for transfer in transfers:
                transfer.wait()
            expected.append((place, memory_of(place, seed=number)))
            transfers.append(swap.write(*expected[-1]))
    for transfer in transfers:
        transfer.wait()
        assert is_over(transfer)
    return expected


@settings(max_examples=25, suppress_health_check=UNCHECKED)
@given(cuts=st.lists(st.integers(0, 9 * BLOCK), max_size=6), num_folders=st.integers(1, 2))
def test_ranges_of_a_place_may_begin_and_end_inside_of_blocks(tmp_path, cuts, num_folders):
    with opened([tmp_path] * num_folders) as swap:
        place = swap.empty(9 * BLOCK)
        ends = [0, *sorted(cuts), place.nbytes]
        ranges = [place[first:last] for first, last in itertools.pairwise(ends)]
        values = [memory_of(part, seed) for seed, part in enumerate(ranges)]
        writes = [swap.write(*each) for each in zip(ranges, values, strict=True)]
        for part, written in zip(ranges, values, strict=True):
            assert torch.equal(content_of(swap, part), written)
        assert all(map(is_over, writes))
        with mock.patch("os.pwritev", side_effect=OSError(5, "broken")):
            failed = [swap.write(*each) for each in zip(ranges, values, strict=True)]
            failed += [swap.write(place[end:end], values[0][:0]) for end in ends]
            for part in filter(torch.numel, ranges):
                with pytest.raises(RuntimeError, match="broken"):
                    swap.read(part, memory_of(part))
            with pytest.raises(RuntimeError, match="broken"):
                swap.check(extent_of(swap, place))
        swap.renew(extent_of(swap, place))
        swap.check(extent_of(swap, place))
        assert torch.equal(place, torch.cat(values))


def test_a_write_begins_when_its_values_are_there_and_what_they_come_from_may_fail(swap):
    place, is_there = swap.empty(BLOCK), threading.Event()
    values = memory_of(place)

    def wait():
        assert is_there.wait(30)

    transfer = swap.write(place, values, wait)
    values.fill_(7)
    assert not is_over(transfer)
    is_there.set()
    transfer.wait()
    assert place.eq(7).all()


def test_values_are_whole_where_the_system_moves_less_than_it_was_asked_for(swap, monkeypatch):
    def short(call):
        return lambda fd, buffers, offset, *flags: call(fd, [buffers[0][:BLOCK]], offset, *flags)

    place = swap.empty(8 * BLOCK)
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    swap.write(place, memory_of(place, 5)).wait()
    assert torch.equal(content_of(swap, place), memory_of(place, 5))


def test_a_failed_write_is_an_error_of_its_extent_alone_until_a_later_one_succeeds(swap, monkeypatch):
    lost, other = swap.empty(6 * BLOCK), swap.empty(6 * BLOCK)
    pwritev, bad = os.pwritev, extent_of(swap, lost).stripes[1].offset

    def full(fd, buffers, offset):
        if offset == bad:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(fd, buffers, offset)

    with monkeypatch.context() as patches:
        patches.setattr(os, "pwritev", full)
        transfers = [swap.write(lost, memory_of(lost, 1)), swap.write(other, memory_of(other, 2))]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"No space left.*offload\.nvme_path"):
                transfers[0].wait()
        transfers[1].wait()
    with pytest.raises(RuntimeError, match="No space left"):
        swap.read(lost, memory_of(lost))
    assert torch.equal(content_of(swap, other), memory_of(other, 2))
    swap.write(lost, memory_of(lost, 3)).wait()
    assert torch.equal(content_of(swap, lost), memory_of(lost, 3))


def test_nobody_uses_the_memory_any_more_when_a_failed_transfer_was_waited_for(swap, monkeypatch):
    place = swap.empty(6 * BLOCK)

    def slow(fd, buffers, offset):
        if offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.1)
        return len(buffers[0])

    monkeypatch.setattr(os, "pwritev", slow)
    transfer = swap.write(place, memory_of(place))
    with pytest.raises(RuntimeError, match="Input/output error"):
        transfer.wait()
    assert is_over(transfer)


def test_a_file_that_ends_while_it_is_read_is_an_error(swap, monkeypatch):
    place = swap.empty(3 * BLOCK)
    swap.write(place, memory_of(place, 1)).wait()
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 100)
    with pytest.raises(RuntimeError, match=r"could not read \d+ bytes at \d+: it ends after 0 bytes"):
        swap.read(place, memory_of(place)).wait()


def test_a_full_disk_is_told_at_once_and_the_other_places_stay(tmp_path, monkeypatch):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    swap = Swap(folders)
    kept = swap.empty(4 * BLOCK)
    swap.write(kept, memory_of(kept, 1)).wait()
    reserve, calls = os.posix_fallocate, []

    def full(fd, offset, length):
        calls.append(length)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = rf"{folders[1]}: could not reserve 40\.0 KiB \(40960 bytes\) more: No space left.*nvme_path"
    with pytest.raises(RuntimeError, match=message):
        swap.empty(20 * BLOCK)
    later = swap.empty(20 * BLOCK)
    swap.write(later, memory_of(later, 2)).wait()
    assert torch.equal(content_of(swap, kept), memory_of(kept, 1))
    assert torch.equal(content_of(swap, later), memory_of(later, 2))
    close(swap)


def test_files_go_with_their_swap_which_waits_for_no_thread(tmp_path, monkeypatch):
    swap = Swap([tmp_path])
    place = swap.empty(1)
    assert len(swap_files(tmp_path)) == 1
    del swap, place
    assert not swap_files(tmp_path)

    swap, may_write, write = Swap([tmp_path]), threading.Event(), os.pwritev

    def write_late(*args):
        assert may_write.wait(30)
        return write(*args)

    place = swap.empty(5 * BLOCK)
    monkeypatch.setattr(os, "pwritev", write_late)
    transfer = swap.write(place, memory_of(place, 1))
    del swap  # a garbage collection that waited here could do so under a lock that the thread needs
    assert len(swap_files(tmp_path)) == 1
    may_write.set()
    del place
    transfer.wait()
    wait_for_all(lambda: not swap_files(tmp_path))


def wait_for_all(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --------------------------------------------------------------------------------------------- arithmetic

BLOCKS = st.integers(0, 60).map(lambda count: count * BLOCK)


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.integers(1, 9), st.lists(BLOCKS, min_size=1, max_size=4))
def test_stripes_follow_what_is_there_and_disks_get_equal_shares(extents, num_blocks, starts):
    ends, size = list(starts), num_blocks * BLOCK
    for padded in extents:
        stripes = cut(padded, size, tuple(ends))
        assert [stripe.start for stripe in stripes] == list(range(0, padded, size))
        assert sum(stripe.num_bytes for stripe in stripes) == padded
        for stripe in stripes:
            assert 0 < stripe.num_bytes <= size
            assert stripe.offset == ends[stripe.file]
            ends[stripe.file] += stripe.num_bytes
    assert max(ends) - min(ends) <= max(size, max(starts) - min(starts))


@given(BLOCKS, st.integers(1, 8), st.integers(1, 3), st.integers(1, 4))
def test_each_thread_gets_a_stripe_where_stripes_are_not_too_small(padded, num_parts, least, factor):
    least, most = least * BLOCK, least * BLOCK * factor
    size = stripe_size(padded, num_parts, least, most)
    assert size % least == 0
    assert least <= size <= most
    num_stripes = -(-padded // size)
    assert num_stripes <= num_parts or size == most
    assert size in (least, most) or (num_stripes - 1) * size < padded <= num_parts * size
