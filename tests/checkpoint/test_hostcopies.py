"""Copies of slices in host memory."""

from itertools import pairwise

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


def test_copies_keep_the_values_and_their_memory_serves_the_next_ones():
    copies, parts, memory = SnapshotMemory(), slices([300, 0, 7, 40]), memory_of("cpu")
    before = [part.data.clone() for part in parts]
    first, wait = copies.copy(parts, memory)
    for part in parts:
        part.data.zero_()
    wait()
    assert all(torch.equal(copy.data, value) for copy, value in zip(first, before, strict=True))
    assert [(copy.name, copy.start, copy.shape) for copy in first] == [
        (part.name, part.start, part.shape) for part in parts
    ]
    second, _ = copies.copy(parts, memory)
    assert [copy.data.data_ptr() for copy in second] == [copy.data.data_ptr() for copy in first]
    assert not any(copy.data.any() for copy in second)
    places = sorted((copy.data.data_ptr(), copy.data.nbytes) for copy in second if copy.data.numel())
    assert all(place % 64 == 0 for place, _ in places)
    assert all(place + size <= after for (place, size), (after, _) in pairwise(places))
    assert copies.copy([], memory)[0] == []


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
