"""Memory of the device that is copied to the host, and comes back.

    to_host      |-- copy a --|                             after compute has made a
    compute      | next unit  | wait, a is freed  ...  | needs a: wait |
    to_device                                  |-- a --|    into new memory of compute

Memory of the device is allocated and freed on compute. A copy reads and writes it on a side stream, so it is
held until compute has been told to wait for that copy. A copy that nobody needs any more may die at any
moment, in any thread and stream. Then the memory that its streams still use is left to `HostCopies.settle`,
or to the end of the buffer if nobody calls that any more.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.comm.streams import Mark, Streams
from zeroshard.tiers.hostpool import HostBuffer, HostMeter, HostPool


class _Leftover(NamedTuple):
    """The memory of a dead copy."""

    buffer: HostBuffer
    """It holds the memory of the device that is in use up to the marks."""
    marks: tuple[Mark, ...]
    """For these the compute stream has not waited yet."""


class HostCopies:
    """Copy memory of one device to the host and back, each direction on its side stream.

    Args:
        device: the device; memory of the host is pinned for CUDA.
        streams: the side streams of the engine.
        meter: counts the bytes on the host.
    """

    def __init__(self, device: torch.device, streams: Streams, meter: HostMeter) -> None:
        self.device, self.streams = device, streams
        self._pool = HostPool(meter, pinned=device.type == "cuda")
        self.left: deque[_Leftover] = deque()
        """Filled by dying copies, which may interrupt anything: nothing else changes there."""

    def copy(self, source: Tensor) -> HostCopy:
        """Start to copy memory to the host, after all compute so far.

        Args:
            source: uint8, [num_bytes]; nobody writes to it until `HostCopy.release`.

        Raises:
            RuntimeError: the host has not enough memory.
        """
        return HostCopy(source, self._pool.take(source.numel()), self)

    def settle(self) -> None:
        """Take back the memory of copies that have died. Called on the compute stream."""
        while self.left:
            leftover = self.left.popleft()
            for mark in leftover.marks:
                mark.wait()
            leftover.buffer.held = ()
            self._pool.give(leftover.buffer)


class HostCopy:
    """One copy on the host. Its memory may be on the device as well: still, or again."""

    __slots__ = ("_arrived", "_back", "_buffer", "_num_bytes", "_owner", "_sent", "_source")

    def __init__(self, source: Tensor, buffer: HostBuffer, owner: HostCopies) -> None:
        self._source: Tensor | None = source
        self._buffer, self._owner, self._num_bytes = buffer, owner, source.numel()
        self._back: Tensor | None = None
        self._arrived: Mark | None = None
        """The end of the copy to the device, until compute waits for it."""
        self._sent: Mark | None = None
        """The end of the copy to the host, until compute waits for it."""
        to_host = owner.streams.to_host
        with torch.no_grad(), to_host.after_compute():
            self._host.copy_(source, non_blocking=True)
        self._sent = to_host.mark()
        buffer.in_use_until(self._sent)

    @property
    def _host(self) -> Tensor:
        return self._buffer.memory[: self._num_bytes]

    def release(self) -> None:
        """Free the source, once compute has waited for the copy."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = self._source = None

    def fetch(self) -> None:
        """Start to copy the memory back, unless it is on the device or on its way.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        if self._source is not None or self._back is not None:
            return
        back = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._owner.device)
        to_device = self._owner.streams.to_device
        with torch.no_grad(), to_device.after_compute():
            back.copy_(self._host, non_blocking=True)
        self._back, self._arrived = back, to_device.mark()
        self._buffer.in_use_until(self._arrived)

    def get(self) -> Tensor:
        """Return the memory on the device, uint8, [num_bytes]; compute waits until it is there.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        self.fetch()
        if self._arrived is not None:
            self._arrived.wait()
            self._arrived = None
        memory = self._back if self._source is None else self._source
        assert memory is not None, "it has been fetched"
        return memory

    def drop(self) -> None:
        """Free the memory on the device that came back; the copy on the host stays."""
        if self._arrived is not None:
            self._arrived.wait()
        self._arrived = self._back = None

    def __del__(self) -> None:
        marks = tuple(mark for mark in (self._sent, self._arrived) if mark is not None)
        held = (self._source, self._back) if marks else ()
        self._buffer.held = tuple(memory for memory in held if memory is not None)
        self._owner.left.append(_Leftover(self._buffer, marks))
