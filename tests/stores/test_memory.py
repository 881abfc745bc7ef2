"""Host memory: its size is exact, it goes back, and the driver knows of it for as long as it is there."""

import os

import pytest
import torch

from tests.stores.held import Driver, HeldBytes, held_bytes
from zeroshard.stores import host
from zeroshard.stores.host import host_memory

PAGE = os.sysconf("SC_PAGE_SIZE")


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
    with pytest.raises(RuntimeError, match=r"Expected .* GiB of host memory"):
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
