"""Copies in host memory: places, sizes of pinned blocks, values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.checkpoint.save import SnapshotMemory, pinned_sizes, place
from zeroshard.checkpoint.tensors import TensorSlice

LEAST = 32 << 20

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def slices(sizes, device="cpu"):
    """Slices of several dtypes that begin somewhere in their tensors."""
    parts = []
    for number, size in enumerate(sizes):
        values = torch.arange(size, device=device).to(DTYPES[number % len(DTYPES)])
        parts.append(TensorSlice(f"{number}", (size + 10,), number % 3, values))
    return parts


@given(st.integers(1, 1 << 40))
def test_pinned_blocks_are_powers_of_two_and_exceed_what_is_needed_by_less_than_the_smallest(total):
    sizes = pinned_sizes(total)
    assert all(size.bit_count() == 1 and size >= LEAST for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert total <= sum(sizes) < total + LEAST


def test_nothing_needs_no_pinned_block():
    assert pinned_sizes(0) == []


@given(
    st.lists(st.integers(0, 300), max_size=8),
    st.lists(st.sampled_from([64, 128, 256, 512, 4096]), max_size=6),
)
def test_every_element_gets_an_aligned_place_of_its_own_inside_a_block(sizes, blocks):
    parts = slices(sizes)
    needed = sum(math.ceil(part.data.nbytes / 64) * 64 for part in parts)
    blocks = [*blocks, max(64, needed)]
    elements, ends = {}, [0] * len(blocks)
    for part, block, start in place(parts, blocks):
        offsets = range(part.start, part.start + part.data.numel())
        elements.setdefault(part.name, []).extend(zip(offsets, part.data.tolist(), strict=True))
        assert start % 64 == 0
        if part.data.numel():
            assert start >= ends[block]
            ends[block] = start + part.data.nbytes
    assert all(end <= size for end, size in zip(ends, blocks, strict=True))
    assert elements == {
        part.name: list(zip(range(part.start, part.start + len(part.data)), part.data.tolist(), strict=True))
        for part in parts
    }


def test_a_slice_is_cut_only_where_a_block_ends():
    (part,) = slices([100])  # bytes
    got = [(p.part.start, p.part.data.numel(), p.block, p.start) for p in place([part], [64, 64])]
    assert got == [(0, 64, 0, 0), (64, 36, 1, 0)]


def test_copies_keep_the_values_and_their_memory_serves_the_next_ones():
    copies, parts = SnapshotMemory(), slices([300, 0, 7, 40])
    before = [part.data.clone() for part in parts]
    first, wait = copies.copy(parts)
    for part in parts:
        part.data.zero_()
    wait()
    assert all(torch.equal(copy.data, value) for copy, value in zip(first, before, strict=True))
    assert [(copy.name, copy.start, copy.shape) for copy in first] == [
        (part.name, part.start, part.shape) for part in parts
    ]
    second, _ = copies.copy(parts)
    assert [copy.data.data_ptr() for copy in second] == [copy.data.data_ptr() for copy in first]
    assert not any(copy.data.any() for copy in second)
    assert copies.copy([])[0] == []


@pytest.mark.gpu
def test_on_a_gpu_copies_are_pinned_and_have_the_values_of_the_moment():
    parts = slices([20 << 20, 3, 5 << 20], "cuda")  # 20 MB, 6 bytes, 20 MB: the last is cut
    before = [part.data.cpu() for part in parts]
    copies = SnapshotMemory()
    torch.cuda._sleep(100_000_000)  # cycles; the copies are queued behind it
    slow = torch.cuda.current_stream().record_event()
    got, wait = copies.copy(parts)
    for part in parts:
        part.data.zero_()  # queued behind the copies
    assert not slow.query()  # the host did not wait
    wait()
    assert all(part.data.is_pinned() for part in got)
    found = {}
    for part in got:
        found.setdefault(part.name, []).append(part.data)
    assert all(
        torch.equal(torch.cat(found[part.name]), value) for part, value in zip(parts, before, strict=True)
    )
