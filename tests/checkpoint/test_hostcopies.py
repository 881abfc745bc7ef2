"""Copies of slices in host memory."""

import pytest
import torch

from zeroshard.checkpoint.save import SnapshotMemory
from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.stores.store import TierMemory

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def slices(sizes, device="cpu"):
    """Slices of several dtypes that begin somewhere in their tensors."""
    parts = []
    for number, size in enumerate(sizes):
        values = torch.arange(size, device=device).to(DTYPES[number % len(DTYPES)])
        parts.append(TensorSlice(f"{number}", (size + 10,), number % 3, values))
    return parts


def memory_of(device):
    return TierMemory(torch.device(device), None, 0)


@pytest.mark.gpu
def test_on_a_gpu_copies_are_pinned_and_have_the_values_of_the_moment():
    parts = slices([20 << 20, 3, 5 << 20], "cuda")  # 20 MB, 6 bytes, 20 MB
    before = [part.data.cpu() for part in parts]
    copies = SnapshotMemory()
    copies.copy(parts, memory_of("cuda"))[1]()  # to pin memory, the driver waits for the device
    torch.cuda._sleep(2_000_000_000)  # cycles, a second; the copies are queued behind it
    slow = torch.cuda.current_stream().record_event()
    got, wait = copies.copy(parts, memory_of("cuda"))
    for part in parts:
        part.data.zero_()  # queued behind the copies
    assert not slow.query()  # the host did not wait
    wait()
    assert all(part.data.is_pinned() for part in got)
    assert all(torch.equal(part.data, value) for part, value in zip(got, before, strict=True))
