"""Copies of a rank's slices in host memory, from which a thread writes while training goes on.

    slices       |--- p1 ---|-- p2 --|-------- p3 --------|
    blocks       |-------------------------|------------|..|
    copies       |--- p1 ---|-- p2 --|- p3 -|-- p3 ------|       a slice is cut where a block ends

On a CPU there is one block of the size that is needed. For accelerators, blocks are pinned: copies into them
are queued on the caller's stream, so that they have the values of this moment, and the host goes on at once.
Torch rounds pinned memory up to a power of two, so blocks are powers of two that add up to little more than
is needed. On a stream of their own the copies would not delay compute, but a forward may change buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.comm.streams import host_wait

_ALIGNMENT = 64
_LEAST_BLOCK = 32 << 20
"""Bytes of the smallest pinned block, and so the most that is taken in vain."""


class Copies(NamedTuple):
    """Slices whose values further training does not change."""

    slices: list[TensorSlice]
    """On the CPU; more than were copied, where some had to be cut."""
    wait: Callable[[], None]
    """Lets the host wait until the values are there."""


class HostCopies:
    """Host memory for the slices of one snapshot, used again for the next."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def copy(self, slices: Sequence[TensorSlice]) -> Copies:
        """Copy the present values. Earlier copies are lost, so their `wait` must have returned.

        Raises:
            RuntimeError: there is no memory for them.
        """
        cpu = torch.device("cpu")
        device = next((part.data.device for part in slices if part.data.device != cpu), cpu)
        self._reserve(sum(_padded(part.data.nbytes) for part in slices), pinned=device != cpu)
        copies = []
        for part, block, start in place(slices, [block.numel() for block in self._blocks]):
            data = part.data
            if data.numel():
                memory = self._blocks[block][start : start + data.nbytes].view(data.dtype)
                copies.append(replace(part, data=memory.copy_(data, non_blocking=True)))
            else:
                copies.append(replace(part, data=data.cpu()))
        return Copies(copies, host_wait(device))

    def _reserve(self, total: int, *, pinned: bool) -> None:
        if sum(block.numel() for block in self._blocks) >= total:
            return
        self._blocks = []  # before larger ones are taken
        sizes = pinned_sizes(total) if pinned else [total]
        self._blocks = [
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for size in sizes
        ]


def pinned_sizes(total: int) -> list[int]:
    """Powers of two, in bytes, that add up to `total` and less than `_LEAST_BLOCK` more; falling."""
    sizes = []
    while total > 0:
        sizes.append(max(_LEAST_BLOCK, 1 << (total.bit_length() - 1)))
        total -= sizes[-1]
    return sizes


class Piece(NamedTuple):
    """A slice, or a part of one, and its place in memory."""

    part: TensorSlice
    block: int
    start: int
    """Bytes from the beginning of the block; a multiple of the alignment."""


def place(slices: Sequence[TensorSlice], sizes: Sequence[int]) -> Iterator[Piece]:
    """Lay slices one after the other into blocks; a slice is cut where a block ends.

    Args:
        slices: which need no more bytes than there are, each rounded up to the alignment.
        sizes: bytes of each block, multiples of the alignment.
    """
    block = start = 0
    for part in slices:
        done, num, itemsize = 0, part.data.numel(), part.data.element_size()
        if not num:
            yield Piece(part, 0, 0)
        while done < num:
            if start == sizes[block]:
                block, start = block + 1, 0
            taken = min(num - done, (sizes[block] - start) // itemsize)
            data = part.data[done : done + taken]
            yield Piece(replace(part, start=part.start + done, data=data), block, start)
            done, start = done + taken, start + _padded(taken * itemsize)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
