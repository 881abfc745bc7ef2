"""Collectives under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from zeroshard.comm import streams
from zeroshard.comm.watch.waits import Waits


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result may be used by the current stream; a second call does nothing."""


class Done:
    """The handle of a collective without anything to exchange."""

    def wait(self) -> None:
        """Return at once."""


DONE: Handle = Done()
"""The handle of a collective that had nothing to exchange."""


class Issued:
    """A collective that the host left to the device."""

    def __init__(self, mark: streams.Mark) -> None:
        self._mark: streams.Mark | None = mark

    def wait(self) -> None:
        """Let the current stream wait for the collective; the host goes on. A second call does nothing."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.wait()


class Several:
    """Several collectives, waited for in order."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Wait for each collective in turn. Raises the error of the first that fails."""
        for handle in self._handles:
            handle.wait()


class Pending:
    """An exchange under way.

    Args:
        waits: the waits of the axis.
        under_way: the exchanges of the axis that nobody has waited for.
        label: the name of the exchange in messages.
        kind: one of the kinds of a counter.
        works: the works that the host waits for.
        then: a function to call when the values have arrived.
    """

    def __init__(
        self,
        waits: Waits,
        under_way: set[Pending],
        label: str,
        kind: str,
        works: Sequence[dist.Work | None],
        then: Callable[[], None] | None = None,
    ) -> None:
        self._waits, self._under_way = waits, under_way
        self._label, self._kind, self._works, self._then = label, kind, works, then
        under_way.add(self)

    def wait(self) -> None:
        """Have the host wait until all values have arrived. A second call does nothing.

        Raises:
            RuntimeError: another rank is lost or too late; the text names this rank and the exchange.
        """
        self._under_way.discard(self)
        works, self._works = self._works, ()
        then, self._then = self._then, None
        self._waits.wait_for(works, self._label, self._kind)
        if then is not None:
            then()

    def drain(self, timeout: timedelta) -> None:
        """Let the exchange end, with or without an error: peers may still read this rank's buffers.

        Nobody waits for it again: Gloo's second wait for a message would not return.
        """
        works, self._works = self._works, ()
        try:
            for work in works:
                if work is not None:
                    work.wait(timeout)
        except RuntimeError:
            pass  # the other side is gone
