"""Gradients leave the device, where main parameters lie elsewhere and the step comes after the backward.

The copies run on a stream of their own, along with the rest of the backward. The host waits for them before
it hands them to the parameters; the step brings them back, part by part. Sums of micro-batches lie on the
host. They come to the device on the same stream, which adds to them and sends them back, so the host adds
nothing. Values of a few buffers are on their way at a time: compute waits for older copies, so that their
memory on the device is free again within the backward. The device also takes the sum of squares before they
leave: the host would have to read all of them once more for their norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroshard.comm import streams
from zeroshard.comm.streams import Mark
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.context import Context
from zeroshard.sharding.storage import count_views

_MOST_UNDER_WAY = 2
"""Reduced gradients of flat buffers that hold memory on the device while they are copied."""


def sends_to_host(buffer: FlatBuffer, context: Context) -> bool:
    """True if the optimizer reads gradients in host memory, and the device is not the host."""
    return (
        buffer.trainable and buffer.plan.main_tier is not Tier.DEVICE and streams.has_streams(context.device)
    )


class Landing:
    """Host memory for the reduced gradients of one buffer.

    Memory is used again as soon as nobody else holds a view of it, by any buffer of the same size. So steps
    during the backward need the memory of a few units.

    Args:
        context: the objects that all buffers share; its `landed` is the memory of all of them.
        size: elements of the reduced gradients.
    """

    def __init__(self, context: Context, size: int) -> None:
        self._context, self._size = context, size
        self._under_way: list[tuple[Mark, tuple[Tensor, ...]]] = []
        """The ends of copies that the host has not waited for, and the memory of the host that they use."""

    @contextmanager
    def beside(self, values: Tensor, *on_host: Tensor) -> Iterator[None]:
        """Issue work on the stream of the copies to the host, after all compute so far.

        Args:
            values: the tensor of the device that this work reads; its memory is kept until the work is over.
            on_host: memory of the host that this work reads or writes; kept likewise.
        """
        to_host = self._context.streams.to_host
        try:
            with to_host.after_compute():
                yield
        finally:
            self._under_way = [one for one in self._under_way if not one[0].is_over()]
            self._under_way.append((to_host.hold(values, most=_MOST_UNDER_WAY), on_host))

    def fetched(self, parts: Sequence[tuple[slice, Tensor]]) -> Tensor:
        """Copy parts to the device, called `beside`; return them in place, [size], in the widest dtype."""
        device = self._context.device
        dtype = max((values.dtype for _, values in parts), key=lambda dtype: dtype.itemsize)
        whole = torch.zeros(self._size, dtype=dtype, device=device)
        for place, values in parts:
            whole[place].copy_(values, non_blocking=True)
        return whole

    def land(self, values: Tensor) -> Tensor:
        """Copy `values`, [size], to the host, called `beside`.

        Returns:
            The host's tensor, to be read after `wait`.
        """
        target = self._find(values)
        target.copy_(values, non_blocking=True)
        return target

    def arrival(self) -> Callable[[], None]:
        """Return a call that lets the host wait until the values so far have landed."""
        marks = tuple(mark for mark, _ in self._under_way)

        def wait() -> None:
            for mark in marks:
                mark.synchronize()

        return wait

    def wait(self) -> None:
        """Let the host wait until all values have landed."""
        self.arrival()()
        for mark, _ in self._under_way:
            self._context.streams.to_host.release(mark)
        self._under_way.clear()

    def _find(self, values: Tensor) -> Tensor:
        """A view of free memory: whoever holds it, or a view of it, keeps the memory from other use."""
        landed = self._context.landed
        free = [m for m in landed if m.numel() == self._size and count_views(m) == 1]
        for memory in free:
            if memory.dtype == values.dtype:
                return memory[:]
        landed[:] = [memory for memory in landed if all(memory is not other for other in free)]
        landed.append(self._context.memory.empty(self._size, values.dtype, Tier.HOST))
        return landed[-1][:]
