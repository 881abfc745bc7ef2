"""Host memory: its size is exact, it goes back, and the driver knows of it for as long as it is there."""

import os
from pathlib import Path

import pytest
import torch

from tests.stores.held import HeldBytes, held_bytes
from zeroshard.stores import host
from zeroshard.stores.host import host_memory

PAGE = os.sysconf("SC_PAGE_SIZE")


def status_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


class Driver:
    """Stands for the CUDA runtime: notes what is registered, and refuses where it is told to."""

    def __init__(self, status=0):
        self.status, self.registered = status, {}

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        if not self.status:
            self.registered[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address):  # noqa: N802
        assert is_mapped(address)
        del self.registered[address]
        return 0


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


def test_resident_memory_grows_by_what_was_asked_for_and_shrinks_again():
    asked, slack = (48 << 20) + 1, 3 << 20
    before = status_bytes("VmRSS")
    values = host_memory(asked, pinned=False).fill_(1)
    assert abs(status_bytes("VmRSS") - before - asked) < slack
    del values
    assert abs(status_bytes("VmRSS") - before) < slack


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


def test_torch_still_has_the_calls_that_pin_memory():
    assert callable(torch.cuda.cudart)
    if torch.version.cuda:  # what torch.cuda.cudart() returns; it asks for a device itself
        assert callable(torch._C._cudart.cudaHostRegister)
        assert callable(torch._C._cudart.cudaHostUnregister)


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
