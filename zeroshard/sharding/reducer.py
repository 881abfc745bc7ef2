"""The gradients of all units: reduced as they arrive, delivered together at the end of a backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from zeroshard.comm.collectives import Axis
from zeroshard.comm.pool import BufferPool
from zeroshard.sharding.gradients import Gradients
from zeroshard.sharding.order import UnitOrder
from zeroshard.sharding.unit import Unit

MAX_IN_FLIGHT = 2
"""Reductions under way: each holds a packed buffer."""


class Reducer:
    """Start reductions, keep a few in flight, agree on what was used, deliver.

    Args:
        units: the root unit first.
        axis: whose ranks take part.
        pool: the buffers that gradients are packed into; emptied after each delivery.
        order: of the units; agreed on here.
    """

    def __init__(self, units: Sequence[Unit], axis: Axis, pool: BufferPool, order: UnitOrder) -> None:
        self._units, self._axis, self._pool = tuple(units), axis, pool
        self._all = tuple(gradients for unit in units for gradients in unit.gradients)
        self._order = order
        self._must_agree = True
        """Whether the next reductions begin with an agreement on the order of units; on all ranks alike."""
        self._to_start: deque[Unit] = deque()
        """What this backward has not begun to reduce, in the order of all ranks."""
        self._ready: set[str] = set()
        """Names of units whose reduction may start when those before them have started."""
        self._in_flight: deque[Gradients] = deque()
        self.is_deferring = False
        """Whether backward adds gradients up locally and sends nothing."""
        self._has_more = False
        """Whether a later backward adds to what this one gives."""
        self.is_half = any(b.full.dtype is torch.float16 for unit in units for b in unit.buffers)
        """Whether gradients pass through float16, where small ones vanish: the loss must be scaled."""
        self.lacks_scale = self.is_half
        """Whether a gradient that arrives now is one of a loss that was not scaled."""
        self._has_deferred = False
        self._is_tainted = False

    @property
    def local_bytes(self) -> int:
        """Bytes of gradients that wait here for a later reduction."""
        return sum(gradients.local_bytes for gradients in self._all)

    @contextmanager
    def deferring(self, more: bool, *, send: bool = False) -> Iterator[None]:
        """While `more`, a later backward adds to the gradients, and this one adds them up locally.

        Args:
            send: reduce them nevertheless; then they go into p.grad, unless that is narrower than float32.
        """
        before = self.is_deferring, self._has_more
        self.is_deferring |= more and not send and self._axis.size > 1
        self._has_more |= more
        try:
            yield
        finally:
            self.is_deferring, self._has_more = before

    @contextmanager
    def scaled(self, loss_scale: float) -> Iterator[None]:
        """While on, backward is that of a loss times `loss_scale`; what it adds to p.grad is without it.

        The scale may change only when there are no gradients.
        """
        self.lacks_scale = False
        for gradients in self._all:
            gradients.unscale = 1.0 / loss_scale
        try:
            yield
        finally:
            self.lacks_scale = self.is_half

    def begin(self) -> None:
        """A backward begins."""
        for gradients in self._all:
            gradients.begin(self._has_more)
        if not self.is_deferring:
            self._open()

    def _open(self) -> None:
        """Reductions begin."""
        if self._must_agree:
            self._order.agree(self._axis)
            self._must_agree = False
        self._to_start, self._ready = deque(self._order.of_reductions()), set()

    def start(self, unit: Unit) -> None:
        """Start the reduction of a unit when it is its turn, unless reductions are deferred; repeatable."""
        if self.is_deferring:
            return
        self._ready.add(unit.name)
        while self._to_start and self._to_start[0].name in self._ready:
            self._start(self._to_start.popleft())

    def _start(self, unit: Unit) -> None:
        unit.start_reduce()
        self._in_flight.extend(unit.gradients)
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._in_flight.popleft().progress()

    def _start_rest(self) -> None:
        """Start what this backward has not reduced, or not all of, the root last."""
        while self._to_start:
            self._start(self._to_start.popleft())
        for unit in self._order.of_reductions():
            if any(gradients.has_more for gradients in unit.gradients):
                self._start(unit)

    def end(self) -> None:
        """A backward has ended: reduce what is left and deliver, or keep the sums."""
        if self.is_deferring:
            self._has_deferred = True
            for gradients in self._all:
                gradients.keep_deferred()
        else:
            self._deliver()

    def before_step(self) -> None:
        """Make the gradients ready for an optimizer: reduce what was deferred.

        Raises:
            RuntimeError: an exception left gradients that hold part of a micro-batch.
        """
        if self._is_tainted:
            raise RuntimeError(
                "an exception in backward left gradients that hold only a part of a micro-batch; "
                "call zero_grad() and repeat the micro-batches since the last step"
            )
        if self._has_deferred:
            for gradients in self._all:
                gradients.is_kept = False
            self._open()
            self._deliver()

    def drop_deferred(self) -> None:
        """Forget gradients that were not reduced yet, as zero_grad() does."""
        self._is_tainted = self._has_deferred = False
        for gradients in self._all:
            if gradients.has_deferred:
                gradients.drop()

    def abandon(self) -> None:
        """A backward has ended in an exception: forget what has not been delivered.

        Other ranks, with other branches, may have started what this one has not.
        """
        if self._to_start:
            self._start_rest()
        delivered = any(p.grad is not None for gradients in self._all for p in gradients.buffer.sharded)
        self._is_tainted |= delivered or self._has_deferred
        self._has_deferred = False
        self._in_flight.clear()
        for unit in self._units:
            unit.drop_gradients()
        self._pool.release()

    def _deliver(self) -> None:
        """Reduce what this backward has not; then hand gradients to the parameters."""
        self._start_rest()
        flags = [flag for gradients in self._all for flag in gradients.used] + [self._order.has_changed]
        answer = self._axis.any(flags, "agreement on which parameters got a gradient")
        for gradients in self._in_flight:
            gradients.progress()
        self._in_flight.clear()
        used = iter(answer())
        for gradients in self._all:
            gradients.deliver([next(used) for _ in gradients.used])
        self._must_agree = next(used)
        self._pool.release()
        self._has_deferred = any(gradients.is_kept for gradients in self._all)
