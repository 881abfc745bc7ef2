"""Memory on each tier of a rank, for whoever needs a tensor there."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm.streams import mark_here
from zeroshard.plan.tiers import Tier
from zeroshard.tiers.files import Extent, Swap, advise
from zeroshard.tiers.memory import host_memory
from zeroshard.tiers.swapfile import BLOCK


class TierMemory:
    """Makes tensors on the tiers of a rank.

    Args:
        device: the device that computes.
        path: `Config.offload.nvme_path`: a folder for files, or several with ":" between them. The files are
            opened at the first tensor in them.
        rank: the rank, for the names of the files.
    """

    def __init__(self, device: torch.device, path: str | None, rank: int) -> None:
        self.device = device
        self.swap = Swap(path.split(":") if path else (), rank)
        """The files of this rank."""
        self.staging_bytes = 0
        """Bytes of host memory through which values of files pass, and in which activations rest."""
        self.piece_bytes = 0
        """Bytes on the device in which values of the host and of files are stepped."""

    def empty(self, size: int, dtype: torch.dtype, tier: Tier) -> Tensor:
        """Return memory for values, [size].

        Raises:
            ValueError: a folder of files is not there, or cannot be written to.
            RuntimeError: there is no such memory.
        """
        if tier is Tier.DEVICE or not size:
            return torch.empty(size, dtype=dtype, device=self.device if tier is Tier.DEVICE else "cpu")
        num_bytes = size * dtype.itemsize
        if tier is Tier.HOST:
            return self.host(num_bytes).view(dtype)
        return self.swap.empty(num_bytes)[:num_bytes].view(dtype)

    def host(self, num_bytes: int) -> Tensor:
        """Return host memory, [num_bytes] of uint8 from the start of a page; pinned if there is a GPU."""
        return host_memory(num_bytes, pinned=self.device.type == "cuda")

    def tier_of(self, tensor: Tensor) -> Tier:
        """The tier that a tensor lies on."""
        if self.is_in_files(tensor):
            return Tier.DISK
        return Tier.DEVICE if tensor.device.type == self.device.type else Tier.HOST

    def is_in_files(self, tensor: Tensor) -> bool:
        """True if a tensor shows a part of the files."""
        return self._extent_of(tensor) is not None

    def _extent_of(self, tensor: Tensor) -> Extent | None:
        if not self.swap.mapped or not tensor.is_cpu:
            return None
        return self.swap.mapped.get(tensor.untyped_storage().data_ptr())

    def evict(self, tensor: Tensor) -> None:
        """Take pages of files that were read or written through a tensor out of memory."""
        if self.is_in_files(tensor):
            advise(tensor, mmap.MADV_DONTNEED)

    def fetch(self, tensor: Tensor) -> None:
        """Let the system read a tensor in files ahead of its use.

        Raises:
            RuntimeError: its values are lost; the message names the file.
        """
        if self.is_in_files(tensor):
            self.check(tensor)
            advise(tensor, mmap.MADV_WILLNEED)

    def check(self, tensor: Tensor) -> None:
        """Check a tensor before its use: one that shows a truncated file would end the process.

        Raises:
            RuntimeError: its values are lost; the message names the file.
        """
        if (extent := self._extent_of(tensor)) is not None:
            self.swap.check(extent)

    def renew(self, tensor: Tensor) -> None:
        """Prepare memory whose values will all be written through tensors, after earlier writes have failed.

        Raises:
            RuntimeError: a file was removed or truncated; the message names it.
        """
        if (extent := self._extent_of(tensor)) is not None:
            self.swap.renew(extent)

    def fill(self, place: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Write values to a place at rest, of uint8, each from a byte of it on; the host waits.

        Raises:
            RuntimeError: a file could not be written; the message names it.
        """
        is_in_files = self.is_in_files(place)
        lead = int(place.storage_offset()) % BLOCK if is_in_files else 0
        target = self.host(lead + place.nbytes)[lead:] if is_in_files else place
        for start, value in parts:
            target[start : start + value.nbytes].view(value.dtype).view(value.shape).copy_(
                value, non_blocking=True
            )
            self.evict(value)
        mark_here(self.device).synchronize()
        if is_in_files:
            self.swap.write(place, target).wait()
