"""Where reduced gradients wait for their step: on the device that computes, or in host memory.

Gradients leave the device where main parameters lie elsewhere and the step comes after the backward. The
copies run on a stream of their own, along with the rest of the backward. At its end the device follows
them, and the host waits before somebody looks, or before it changes them. The step brings them back, part by
part. Sums of micro-batches lie on the host. They come to the device on the same stream, which adds to them
and sends them back, so the host adds nothing. Values of a few buffers are on their way at a time: compute
waits for older copies, so that their memory on the device is free again within the backward. The device also
takes the sum of squares before they leave: the host would have to read all of them once more for their norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroshard.comm import streams
from zeroshard.comm.streams import Mark, SideStream
from zeroshard.plan.tiers import Tier
from zeroshard.stores.storage import count_views
from zeroshard.stores.store import GradientStore, TierMemory

_MOST_UNDER_WAY = 2
"""Reduced gradients of flat buffers that hold memory on the device while they are copied."""


class HostGradients(GradientStore):
    """Reduced gradients of all buffers in host memory, and the copies to it.

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
            self._last = self._to_host.hold(values, most=_MOST_UNDER_WAY)

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
