"""Where the values of a slice rest: a store on each tier of a rank, and the memory for it.

    Store       values at rest, which anybody may read and write in between
        load        to other memory, on the current stream
        store       from other memory
        prefetch    the system reads files ahead of a load
        version     another one after each write
    TierMemory  makes them, and moves values between them
    GradientStore  reduced gradients until their step; HostGradients, where they leave the device

Main parameters, their copies, averages and versions of an asynchronous pipeline are stores. States of an
optimizer are tensors at rest, as its `state` shows them; `pieces.py` moves these.

[Note: Gradients on the host] Gradients leave the device where main parameters lie elsewhere and the step
comes after the backward. The copies run on a stream of their own, along with the rest of the backward. At
its end the device follows them, and the host waits before somebody looks, or before it changes them. The
step brings them back, part by part. Sums of micro-batches lie on the host. They come to the device on the
same stream, which adds to them and sends them back, so the host adds nothing. Values of a few buffers are on
their way at a time: compute waits for older copies, so that their memory on the device is free again within
the backward. The device also takes the sum of squares before they leave: the host would have to read all of
them once more for their norm.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.comm import streams
from zeroshard.comm.streams import Mark, SideStream, mark_here
from zeroshard.plan.pieces import MOST_UNDER_WAY
from zeroshard.plan.tiers import Tier
from zeroshard.stores.files import Extent, Swap, advise
from zeroshard.stores.host import host_memory
from zeroshard.stores.storage import count_views
from zeroshard.stores.swapfile import PAGE


class TierMemory:
    """Makes tensors on the tiers of a rank.

    Args:
        device: the device that computes.
        path: `Config.offload.nvme_path`: a folder for files, or several with ":" between them. The files are
            opened at the first tensor in them.
    """

    def __init__(self, device: torch.device, path: str | None) -> None:
        self.device = device
        self.swap = Swap(path.split(":") if path else ())
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
            RuntimeError: its values are lost; the message names the folder.
        """
        if (extent := self._extent_of(tensor)) is not None:
            self.swap.check(extent)
            advise(tensor, mmap.MADV_WILLNEED)

    def copy(self, values: Tensor, target: Tensor) -> None:
        """Copy values of any tier and dtype, on the current stream; a device that is not the host casts.

        Raises:
            RuntimeError: values are lost; the message names the folder.
        """
        self.fetch(values)
        if values.is_cpu and not target.is_cpu:  # torch would cast on the host, and wait
            values = values.to(target.device, non_blocking=True)
        target.copy_(values, non_blocking=True)
        self.evict(values)
        self.evict(target)

    def renew(self, tensor: Tensor) -> None:
        """Prepare memory whose values will all be written through tensors, after earlier writes failed."""
        if (extent := self._extent_of(tensor)) is not None:
            self.swap.renew(extent)

    def fill(self, place: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Write values to a place at rest, of uint8, each from a byte of it on; the host waits.

        Raises:
            RuntimeError: a file could not be written; the message names the folder.
        """
        is_in_files = self.is_in_files(place)
        lead = int(place.storage_offset()) % PAGE if is_in_files else 0
        target = self.host(lead + place.nbytes)[lead:] if is_in_files else place
        for start, value in parts:
            target[start : start + value.nbytes].view(value.dtype).view(value.shape).copy_(
                value, non_blocking=True
            )
            self.evict(value)
        mark_here(self.device).synchronize()
        if is_in_files:
            self.swap.write(place, target).wait()


class Values(Protocol):
    """What can be loaded: a store, or values that are computed from one."""

    @property
    def version(self) -> Hashable:
        """Equal where the values are the same."""

    def load(self, out: Tensor) -> None:
        """Write them to memory of any tier and dtype, on the current stream."""


_numbers = itertools.count()


class Store:
    """Values at rest.

    Args:
        values: [n], perhaps shown by other tensors.
        memory: the memory of the rank.
        tier: where `values` lie.
    """

    def __init__(self, values: Tensor, memory: TierMemory, tier: Tier = Tier.DEVICE) -> None:
        self.values, self._memory = values, memory
        self.is_near = tier is Tier.DEVICE
        """True if the device that computes has the values."""
        self._number, self._num_changes = next(_numbers), 0

    @property
    def version(self) -> Hashable:
        """Another one after each write that torch counts, or that `changed` notes."""
        return self._number, self._num_changes, self.values._version

    def changed(self) -> None:
        """Note that values were written, perhaps by kernels and files, which torch does not count."""
        self._num_changes += 1

    def prefetch(self) -> None:
        """Let the system read values ahead of a load, if they lie in files.

        Raises:
            RuntimeError: they are lost; the message names the folder.
        """
        self._memory.fetch(self.values)

    def load(self, out: Tensor, start: int = 0) -> None:
        """Copy the values from an element on to memory of any tier and dtype, on the current stream.

        Raises:
            RuntimeError: they are lost; the message names the folder.
        """
        self._memory.copy(self.values.detach()[start : start + out.numel()], out)

    def store(self, values: Tensor, start: int = 0) -> None:
        """Copy values of any tier and dtype here, from an element on, on the current stream."""
        self._memory.copy(values, self.values[start : start + values.numel()])


class GradientStore:
    """Reduced gradients that stay where they are."""

    is_near = True
    """True if the device that computes has them."""
    beside: Callable[[Tensor], AbstractContextManager[object]] = nullcontext
    """Returns a context in which work uses its argument, a tensor of the device, and calls `store`."""

    def store(self, values: Tensor) -> Tensor:
        """Return `values`, [n], where they rest, to be read after `wait`; called `beside`."""
        return values

    def follow(self) -> None:
        """Let the current stream wait until all values are at rest; their memory of the device may go."""

    def wait(self) -> None:
        """Let the host wait until all values are at rest."""


class HostGradients(GradientStore):
    """Reduced gradients of all buffers in host memory, and the copies to it; [Note: Gradients on the host].

    Memory is used again as soon as nobody else holds a view of it, for gradients of the same size: on the
    stream, copies to it come after those of its former use. So steps during the backward need the memory of a
    few units.

    Args:
        memory: the memory of the rank.
        to_host: the stream of the copies.
    """

    is_near = False

    def __init__(self, memory: TierMemory, to_host: SideStream) -> None:
        self._memory, self._to_host = memory, to_host
        self.places: list[Tensor] = []
        """Host memory of reduced gradients, in use or free, [num_bytes] each."""
        self._last = Mark(None)
        """The end of the last work `beside`."""

    @contextmanager
    def beside(self, values: Tensor) -> Iterator[None]:
        """Issue work on the stream of the copies to the host, after all compute so far.

        Args:
            values: the tensor of the device that this work uses; its memory is kept until the work is over.
        """
        try:
            with self._to_host.after_compute():
                yield
        finally:
            self._last = self._to_host.hold(values, most=MOST_UNDER_WAY)

    def store(self, values: Tensor) -> Tensor:
        """Copy `values` to the host; whoever holds the result, or a view, keeps its memory from other use."""
        free = (m for m in self.places if m.nbytes == values.nbytes and count_views(m) == 1)
        if (memory := next(free, None)) is None:
            memory = self._memory.empty(values.nbytes, torch.uint8, Tier.HOST)
            self.places.append(memory)
        target = memory.view(values.dtype)
        return target.copy_(values, non_blocking=True) if values.numel() else target

    def follow(self) -> None:
        self._last.wait()
        self._to_host.release()

    def wait(self) -> None:
        self._last.synchronize()


def gradients_of_others(memory: TierMemory, to_host: SideStream) -> GradientStore:
    """Return the store of gradients whose main parameters lie elsewhere; a host that computes keeps them."""
    return HostGradients(memory, to_host) if streams.has_streams(memory.device) else GradientStore()
