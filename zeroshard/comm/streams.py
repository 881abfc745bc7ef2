"""Device streams; the only file that knows them. On CPU everything here does nothing.

Three streams: the caller's (compute), one for gathers and one for reductions. Work on a side stream
starts after all compute issued so far, so memory that compute has released is safe to use there;
compute waits for a side stream only where it needs the result. A buffer is allocated and freed on the
same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a side stream that compute can wait for."""

    event: torch.Event | None

    def wait(self) -> None:
        """Let the current stream wait; the host goes on."""
        if self.event is not None:
            torch.accelerator.current_stream().wait_event(self.event)


class SideStream:
    """A stream beside compute, on an accelerator; on CPU, plain execution in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Issue work here, after all that was issued on the current stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def mark(self) -> Mark:
        """The point after the work issued here so far."""
        return Mark(None if self._stream is None else self._stream.record_event())


@dataclass(frozen=True, slots=True)
class Streams:
    """The side streams of one engine."""

    gather: SideStream
    reduce: SideStream

    @staticmethod
    def on(device: torch.device) -> Streams:
        return Streams(SideStream(device), SideStream(device))


def host_wait(device: torch.device) -> Callable[[], None]:
    """Return a call that waits until the device has done all that its current stream was given so far.

    Only the thread that makes the call waits, whichever it is. On CPU everything is done already.
    """
    if device.type == "cpu":
        return lambda: None
    return torch.accelerator.current_stream(device).record_event().synchronize
