from __future__ import annotations

import pytest

from zeroshard.tiers import hostpool
from zeroshard.tiers.hostpool import HostMeter, HostPool, size_class

PAGE, MB = 4096, 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (1, PAGE),
        (PAGE, PAGE),
        (PAGE + 1, 2 * PAGE),
        (8 * MB, 8 * MB),
        (8 * MB + 1, 9 * MB),
        (15 * MB, 15 * MB),
    ],
)
def test_a_buffer_is_at_most_an_eighth_or_a_page_larger_than_asked_for(num_bytes: int, expected: int) -> None:
    assert size_class(num_bytes) == expected


def test_a_buffer_of_the_same_class_is_used_again() -> None:
    pool = HostPool(HostMeter(), pinned=False)
    first = pool.take(8 * MB - 5)
    other = pool.take(8 * MB)
    assert other.data_ptr() != first.data_ptr()
    pool.give(first)
    assert pool.take(8 * MB - 9).data_ptr() == first.data_ptr()


def test_all_buffers_are_never_more_than_were_in_use_at_once() -> None:
    meter = HostMeter()
    pool = HostPool(meter, pinned=False)
    pool.give(pool.take(2 * MB))
    small = [pool.take(MB), pool.take(MB)]
    assert meter.num_bytes == 2 * MB
    for buffer in small:
        pool.give(buffer)
    pool.take(PAGE)
    assert meter.num_bytes == MB + PAGE
    large = pool.take(4 * MB)
    pool.give(large)
    assert meter.num_bytes == 4 * MB + PAGE
    assert meter.pinned == 0


def test_an_error_of_the_allocator_tells_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = HostMeter()
    pool = HostPool(meter, pinned=True)

    def fail(num_bytes: int, pinned: bool) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(hostpool, "host_memory", fail)
    with pytest.raises(RuntimeError, match=r"no 4096 bytes of pinned host memory .*\(torch: CUDA error: out"):
        pool.take(10)
    monkeypatch.undo()
    pool = HostPool(meter, pinned=False)
    pool.take(10)
    assert (meter.num_bytes, meter.pinned) == (4096, 0)
