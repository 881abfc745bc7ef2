"""Device streams; the only file that knows them. On CPU these calls do nothing.

The caller's stream is compute. There is a side stream for gathers, one for reductions, and one for the copies
of each direction between device and host. Work on a side stream starts after all compute issued so far, so
memory that compute has released is safe to use there; compute waits for a side stream only where it needs the
result. A buffer is allocated and freed on the same stream. Collectives run on the stream that is current when
they are issued (see `Axis`), so a mark that follows one on its side stream covers it.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

_HIGH_PRIORITY = -1
"""torch.Stream: 0 is the default, a negative number is higher. A collective then need not wait until the
blocks of a large compute kernel have all been placed."""


def has_streams(device: torch.device) -> bool:
    """True if work is queued on a stream of the device; False if the host computes by itself."""
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a stream: all that was issued there before it."""

    event: torch.Event | None
    """None on CPU, where issued work is always over."""
    device: torch.device | None = None
    """The device of the event."""

    def wait(self) -> None:
        """Let the current stream of the device wait; the host goes on."""
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)

    def synchronize(self) -> None:
        """Let the host wait until the device has come past the mark."""
        if self.event is not None:
            self.event.synchronize()

    def is_over(self) -> bool:
        """True when the device has come past the mark; called from any thread."""
        return self.event is None or self.event.query()


def mark_here(device: torch.device) -> Mark:
    """Return the mark after all work so far on the current stream of `device`."""
    event = torch.accelerator.current_stream(device).record_event() if has_streams(device) else None
    return Mark(event, device)


class SideStream:
    """A stream that runs during compute, on an accelerator; on CPU, plain execution in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device, priority=_HIGH_PRIORITY) if has_streams(device) else None
        self._held: deque[tuple[Tensor, Mark]] = deque()
        """Tensors that this stream reads, and the ends of its reads."""

    def after_compute(self) -> AbstractContextManager[object]:
        """Return a context that issues work on this stream, after all work so far on the current stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        return self._stream

    def here(self) -> AbstractContextManager[object]:
        """Return a context that issues work on this stream, which waits for no compute."""
        return nullcontext() if self._stream is None else self._stream

    def mark(self) -> Mark:
        """Return the mark after the work on this stream so far."""
        return Mark(None if self._stream is None else self._stream.record_event(), self._device)

    def hold(self, tensor: Tensor, *, most: int) -> Mark:
        """Keep the memory of a tensor until the work on this stream so far, which reads it, is over.

        Args:
            tensor: a tensor of the current stream, which is going to let it go.
            most: the number of tensors that are kept; the current stream waits for the reads of older ones.

        Returns:
            The mark after the work so far.
        """
        mark = self.mark()
        self._held.append((tensor, mark))
        while len(self._held) > most:
            self._held[0][1].wait()
            self._held.popleft()
        return mark

    def release(self) -> None:
        """Release all tensors that are held: the host has waited for the last mark of `hold`."""
        self._held.clear()


class Stopwatch:
    """Times work that is issued on the current stream; a context."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._begin = self.point()

    def __exit__(self, *_: object) -> None:
        self.add(self._begin)

    def point(self) -> Any:
        """Return the point after the work so far: an event, or seconds of the host's clock."""
        if not has_streams(self._device):
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        torch.accelerator.current_stream(self._device).record_event(event)
        return event

    def add(self, begin: Any) -> None:
        """Add the work from a point to here."""
        self._spans.append((begin, self.point()))

    def read(self) -> list[float]:
        """Return the seconds of each piece of work so far; the host waits for the end of the last one."""
        if not has_streams(self._device):
            return [end - begin for begin, end in self._spans]
        for _, end in self._spans[-1:]:
            end.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._spans]


@dataclass(frozen=True, slots=True)
class Streams:
    """The side streams of one engine."""

    gather: SideStream
    reduce: SideStream
    to_host: SideStream
    to_device: SideStream

    def join(self) -> None:
        """Let the current stream wait for all side streams."""
        for field in fields(self):
            getattr(self, field.name).mark().wait()

    @staticmethod
    def on(device: torch.device) -> Streams:
        """Make the side streams of a device; on CPU their work runs at once."""
        return Streams(*(SideStream(device) for _ in fields(Streams)))
