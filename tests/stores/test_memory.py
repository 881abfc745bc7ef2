"""Host memory: its size is exact, it goes back, the driver knows of it meanwhile, and pools use it again."""

import ctypes
import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.endings import run
from tests.stores.held import Driver, HeldBytes, held_bytes
from zeroshard.comm.streams import Mark, Streams
from zeroshard.forwards.activations import HostCopies, size_class
from zeroshard.stores import host
from zeroshard.stores.host import host_memory
from zeroshard.stores.store import HostGradients, TierMemory

__all__ = ["run"]

PAGE, MB = os.sysconf("SC_PAGE_SIZE"), 1 << 20
STREAMS = Streams.on(torch.device("cpu"))


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


@pytest.mark.long_where(num_bytes=[PAGE - 1, PAGE])
@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, 5_000_001])
def test_memory_has_the_size_that_was_asked_for_and_begins_on_a_page(num_bytes):
    before = held_bytes()
    values = host_memory(num_bytes, pinned=False)
    assert (values.shape, values.dtype) == ((num_bytes,), torch.uint8)
    assert values.data_ptr() % PAGE == 0
    assert not values.any()
    assert held_bytes() == (before.host + num_bytes, before.pinned)
    view = values[:1]
    del values
    assert held_bytes().host == before.host + num_bytes
    del view
    assert held_bytes() == before


def test_no_memory_is_an_empty_tensor_and_too_much_of_it_an_error():
    before = held_bytes()
    assert host_memory(0, pinned=True).shape == (0,)
    with pytest.raises(RuntimeError, match=r"Expected .* TiB of host memory"):
        host_memory(1 << 60, pinned=False)
    assert held_bytes() == before


def test_a_forked_process_refers_to_the_same_pages_and_takes_none_away():
    values, before = host_memory(PAGE, pinned=False), held_bytes()
    child = os.fork()
    if child == 0:
        values[0] = 7
        del values
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert values[0] == 7
    assert held_bytes() == before


def test_pinned_memory_is_registered_until_it_goes(driver):
    before = held_bytes()
    values = host_memory(3 * PAGE + 1, pinned=True)
    assert driver.registered == {values.data_ptr(): 3 * PAGE + 1}
    assert held_bytes() == HeldBytes(before.host + 3 * PAGE + 1, before.pinned + 3 * PAGE + 1)
    del values
    assert not driver.registered
    assert held_bytes() == before


def test_a_driver_that_refuses_is_an_error_and_leaves_nothing(driver):
    driver.status = 2
    with pytest.raises(RuntimeError, match=r"refused to pin 4\.0 KiB .*CUDA error 2.*ulimit -l"):
        host_memory(4096, pinned=True)
    assert not driver.registered


@pytest.mark.gpu
def test_on_a_gpu_memory_is_pinned_until_it_goes():
    values = host_memory(5_000_001, pinned=True)
    assert values.is_pinned()
    on_device = torch.randint(256, (5_000_001,), dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(100_000_000)  # cycles; the copy is queued behind it
    values.copy_(on_device, non_blocking=True)
    mark = torch.cuda.current_stream().record_event()
    assert not mark.query()  # the host did not wait
    mark.synchronize()
    assert torch.equal(values, on_device.cpu())
    for _ in range(3):  # a range can be registered again only after it was unregistered
        host.unregister(values.data_ptr())
        assert not values.is_pinned()
        assert not torch.cuda.cudart().cudaHostRegister(values.data_ptr(), values.numel(), 0)
        assert values.is_pinned()


def left_by_freed_tensors(*, calls):
    """Bytes that tensors leave behind in a process whose allocator keeps smaller ones than 32 MiB."""
    ctypes.CDLL(None).mallopt(host._M_MMAP_THRESHOLD, 32 << 20)
    if calls:
        host.return_freed_memory()
    ctypes.CDLL(None).malloc_trim(0)  # or the tensors may lie in freed pages, which are there already
    before = resident()
    tensors = [torch.empty(8 << 20, dtype=torch.uint8).fill_(1) for _ in range(16)]
    tensors.sort(key=torch.Tensor.data_ptr)
    last = tensors.pop()  # above the others, if they lie in the heap
    tensors.clear()
    return resident() - before - last.nbytes


def resident():
    """Bytes without pages of files: a fork reads those of its libraries once more."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in one)
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not hasattr(os, "confstr") or sys.platform != "linux", reason="about glibc")
def test_freed_tensors_leave_nothing_behind_unless_the_user_gave_a_threshold(run):
    script = """
import os
from tests.stores.test_memory import left_by_freed_tensors
os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
os.environ.update({threshold})
print(left_by_freed_tensors(calls={calls}))
"""
    given = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
    runs = [(True, {}), (False, {}), (True, given)]
    scripts = [script.format(calls=calls, threshold=threshold) for calls, threshold in runs]
    returned, kept, as_given = [int(end.last_line) for (end,) in run(*scripts, num_ranks=1)]
    assert returned < 8 << 20
    assert kept > 32 << 20
    assert as_given > 32 << 20


# ----------------------------------------------------------------------------------- pools of activations


def test_a_buffer_is_at_most_an_eighth_or_a_page_larger_than_asked_for():
    sizes = {1: PAGE, PAGE: PAGE, PAGE + 1: 2 * PAGE, 8 * MB: 8 * MB, 8 * MB + 1: 9 * MB, 15 * MB: 15 * MB}
    assert {num_bytes: size_class(num_bytes) for num_bytes in sizes} == sizes


def test_a_buffer_of_the_same_class_is_used_again():
    pool = HostCopies(TierMemory(torch.device("cpu"), None), STREAMS)
    first = pool.take(8 * MB - 5)
    other = pool.take(8 * MB)
    assert other is not first
    pool.give(first)
    assert pool.take(8 * MB - 9) is first


def test_all_buffers_are_never_more_than_were_in_use_at_once():
    meter = TierMemory(torch.device("cpu"), None)
    pool = HostCopies(meter, STREAMS)
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


def test_the_driver_forgets_a_buffer_only_after_its_last_copy(driver):
    waits, pool = [], HostCopies(TierMemory(torch.device("cuda"), None), STREAMS)

    def used(pool, num_bytes):
        """A buffer with a copy; it must still be registered when the host waits for that."""
        buffer = pool.take(num_bytes)
        address = buffer.memory.data_ptr()
        event = SimpleNamespace(synchronize=lambda: waits.append(driver.registered[address]))
        buffer.last = Mark(event)
        return buffer

    pool.give(used(pool, 8 * MB))
    small = used(pool, 2 * MB)
    assert waits == [8 * MB]  # the pool has dropped the large one
    assert list(driver.registered.values()) == [2 * MB]
    pool.give(small)
    small.held = small  # even in a cycle that the garbage collector finds
    del small, pool
    gc.collect()
    assert waits == [8 * MB, 2 * MB]
    assert not driver.registered


# --------------------------------------------------------------------------------- buffers of gradients

NUMEL = 1024


@pytest.fixture
def store():
    return HostGradients(TierMemory(torch.device("cpu"), None), STREAMS.to_host)


def leave(store, values):
    with store.beside(values):
        return store.store(values)


def test_buffers_of_one_size_share_memory_that_is_free(store):
    before, addresses = held_bytes().host, set()
    for number in range(6):
        gradient = leave(store, torch.full((NUMEL,), float(number)))[:10]  # p.grad is such a view
        store.wait()
        assert gradient.eq(number).all()
        addresses.add(gradient.data_ptr())
        del gradient
    assert len(addresses) == len(store.places) == 1
    assert held_bytes().host - before == NUMEL * 4


def test_memory_that_is_held_is_not_written_to(store):
    first, second = leave(store, torch.ones(NUMEL)), leave(store, torch.zeros(NUMEL))
    part = first[:4]
    del first
    leave(store, torch.zeros(NUMEL))
    store.wait()
    assert part.eq(1).all()
    assert second.eq(0).all()
