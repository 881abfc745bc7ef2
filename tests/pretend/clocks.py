"""Pretend streams and events. They keep vector clocks, which tell what is ordered before what.

A stream counts its operations. Its clock holds, for each stream, the last operation of that stream that has
ended when the next operation here begins. A wait joins two clocks. The host has a clock too: an operation
begins after everything that the host has waited for before it issued the operation.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple


class Clock(dict[str, int]):
    """The last operation of each stream that lies before some point."""

    def join(self, other: Clock) -> None:
        """Let what lies before `other` lie before this point too."""
        # Another thread, or a garbage collection that the loop starts, may add to it.
        for stream, tick in other.copy().items():
            if self.get(stream, 0) < tick:
                self[stream] = tick

    def covers(self, stream: str, tick: int) -> bool:
        """True when operation `tick` of `stream` lies before this point."""
        return self.get(stream, 0) >= tick


class Point(NamedTuple):
    """One operation: its stream's name and its number there."""

    stream: str
    tick: int


HOST = "the host"
"""The name of the main thread; those of others begin with it."""
_number = itertools.count().__next__


class _Thread(threading.local):
    """What each host thread has of its own."""

    def __init__(self) -> None:
        self.current: Stream | None = None
        self.clock = Clock()
        self.name = HOST if threading.current_thread() is threading.main_thread() else f"{HOST} {_number()}"


class Timeline:
    """The streams of one device, and the host's threads, which issue operations to them."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._num_named: dict[str, int] = {}
        self.main = self._thread.clock
        """What the thread has waited for that made the timeline."""
        self.awaited = Clock()
        """What some thread has waited for."""
        self.default = self.stream("compute")

    def stream(self, name: str) -> Stream:
        """Make a stream; a name that is taken gets a number."""
        number = self._num_named[name] = self._num_named.get(name, 0) + 1
        return Stream(name if number == 1 else f"{name}{number}", self)

    @property
    def current(self) -> Stream:
        """The stream to which this thread issues."""
        return self._thread.current or self.default

    @current.setter
    def current(self, stream: Stream) -> None:
        self._thread.current = stream

    @property
    def host(self) -> Clock:
        """What this thread has waited for, and done itself."""
        return self._thread.clock

    def wait_for(self, clock: Clock) -> None:
        """This thread waits for all that lies before a point."""
        self.host.join(clock)
        self.awaited.join(clock)

    def act_on_host(self) -> Point:
        """This thread does something itself."""
        name, clock = self._thread.name, self._thread.clock
        tick = clock[name] = clock.get(name, 0) + 1
        return Point(name, tick)


class Stream:
    """Stands in for `torch.Stream`: its operations run one after another."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name, self.clock = name, Clock()
        self._timeline = timeline
        self._before: Stream | None = None

    def issue(self) -> Point:
        """Issue one operation."""
        self.clock.join(self._timeline.host)
        tick = self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return Point(self.name, tick)

    def has_seen(self, point: Point) -> bool:
        """True when the next operation here begins after `point` has ended."""
        return self.clock.covers(*point) or self._timeline.host.covers(*point)

    def wait_stream(self, other: Stream) -> None:
        self.clock.join(other.clock)

    def wait_event(self, event: Event) -> None:
        self.clock.join(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._timeline)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._timeline.wait_for(self.clock)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        assert self._before is None, "as with torch.Stream, a stream's context is not entered twice"
        self._before, self._timeline.current = self._timeline.current, self
        return self

    def __exit__(self, *_: object) -> None:
        assert self._before is not None, "the context was entered"
        self._timeline.current, self._before = self._before, None


class Event:
    """Stands in for `torch.Event`: a point in a stream."""

    def __init__(self, timeline: Timeline, **_: Any) -> None:
        self.clock = Clock()
        self.stream: Stream | None = None
        """The stream in which it was recorded."""
        self._timeline = timeline

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self._timeline.current
        self.clock = Clock(self.stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._timeline.current).wait_event(self)

    def synchronize(self) -> None:
        self._timeline.wait_for(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0
