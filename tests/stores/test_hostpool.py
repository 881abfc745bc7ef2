from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from tests.stores.held import Driver
from zeroshard.comm.streams import Mark, Streams
from zeroshard.forwards.activations import HostCopies, size_class
from zeroshard.stores.host import HostBuffer
from zeroshard.stores.store import TierMemory

PAGE, MB = 4096, 1 << 20


def memory_on(device: str) -> TierMemory:
    return TierMemory(torch.device(device), None, 0)


def pool_in(memory: TierMemory) -> HostCopies:
    return HostCopies(memory, Streams.on(torch.device("cpu")))


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
    pool = pool_in(memory_on("cpu"))
    first = pool.take(8 * MB - 5)
    other = pool.take(8 * MB)
    assert other is not first
    pool.give(first)
    assert pool.take(8 * MB - 9) is first


def test_all_buffers_are_never_more_than_were_in_use_at_once() -> None:
    meter = memory_on("cpu")
    pool = pool_in(meter)
    pool.give(pool.take(2 * MB))
    small = [pool.take(MB), pool.take(MB)]
    assert meter.staging_bytes == 2 * MB
    for buffer in small:
        pool.give(buffer)
    pool.take(PAGE)
    assert meter.staging_bytes == MB + PAGE
    large = pool.take(4 * MB)
    pool.give(large)
    assert meter.staging_bytes == 4 * MB + PAGE


def pinned_pool(monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, TierMemory, HostCopies]:
    driver, meter = Driver(), memory_on("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver, meter, pool_in(meter)


def test_the_driver_forgets_a_buffer_only_after_its_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, pool = pinned_pool(monkeypatch)
    waits: list[int] = []

    def used(pool: HostCopies, num_bytes: int) -> HostBuffer:
        """A buffer with a copy; it must still be registered when the host waits for that."""
        buffer = pool.take(num_bytes)
        address = buffer.memory.data_ptr()
        event = SimpleNamespace(synchronize=lambda: waits.append(driver.registered[address]))
        buffer.last = Mark(event)  # type: ignore[arg-type]
        return buffer

    pool.give(used(pool, 8 * MB))
    small = used(pool, 2 * MB)
    assert (waits, list(driver.registered.values())) == (
        [8 * MB],
        [2 * MB],
    )  # the pool has dropped the large one
    pool.give(small)
    small.held = small  # type: ignore[assignment]  # even in a cycle that the garbage collector finds
    del small, pool
    gc.collect()
    assert waits == [8 * MB, 2 * MB]
    assert not driver.registered
