"""Memory as a caching allocator deals with it: blocks, who accesses them, and what a reuse may run into.

The model follows torch's CUDA caching allocator. A block belongs to the stream on which it was allocated.
When the host frees it, the next allocation on that stream may get the same memory at once, although other
streams may not have come to their accesses yet. `record_stream` would prevent that, and is not modelled:
the engine does without it. Any later block of a stream may be the memory of any earlier one, whatever their
sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.pretend.clocks import HOST, Clock, Point, Stream
from tests.pretend.findings import Finding, Kind


class Span(NamedTuple):
    """A range of bytes."""

    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop

    def contains(self, other: Span) -> bool:
        return self.start <= other.start and other.stop <= self.stop


class Access(NamedTuple):
    """One operation that reads or writes a part of a block."""

    point: Point
    what: str
    writes: bool
    span: Span

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.what} on {self.point.stream}"


class _Hazard(NamedTuple):
    """An access to memory that was freed since."""

    access: Access
    block: str


class Block:
    """Memory between an allocation and its end."""

    __slots__ = (
        *("_checked", "_hazards", "is_freed", "is_kept", "is_pinned", "name", "reads", "stream"),
        "writes",
    )

    def __init__(
        self, name: str, stream: str, hazards: dict[str, _Hazard], *, is_pinned: bool = False
    ) -> None:
        self.name, self.stream, self.is_pinned = name, stream, is_pinned
        self.is_freed = False
        self.is_kept = True
        """False for pinned memory that goes back to the system with its last tensor, whoever uses it."""
        self.writes: list[Access] = []
        """Those that no later write covers."""
        self.reads: dict[tuple[str, Span], Access] = {}
        """The last ones of each stream and span that no later write covers."""
        self._hazards = hazards
        self._checked: set[str] = set()
        """Streams whose first access has been held against the hazards; later ones come after it."""

    def accesses(self) -> Iterator[Access]:
        """The accesses after which every access so far lies, if there was no race."""
        yield from self.writes
        yield from self.reads.values()

    def add(self, access: Access) -> None:
        """Note an access that lies after those so far, if there was no race."""
        span = access.span
        if access.writes:
            self.writes = [write for write in self.writes if not span.contains(write.span)]
            self.writes.append(access)
            self.reads = {key: read for key, read in self.reads.items() if not span.contains(read.span)}
        else:
            self.reads[access.point.stream, span] = access

    def hazards_of(self, stream: Stream) -> Iterator[_Hazard]:
        """What a first access by `stream` may run into."""
        if stream.name not in self._checked:
            self._checked.add(stream.name)
            for hazard in self._hazards.values():
                if not stream.has_seen(hazard.access.point):
                    yield hazard


class Allocator:
    """Hand out blocks, note accesses, report mistakes.

    Args:
        report: called with each mistake, again when it happens again.
    """

    def __init__(self, report: Callable[[Finding], None]) -> None:
        self._report = report
        self._freed: dict[str, dict[str, _Hazard]] = defaultdict(dict)
        """By the stream that owned the memory: the last access of each stream to what was freed."""
        self._reported: set[tuple[Point, str]] = set()
        """Accesses to freed memory that a stream is known to run into: one mistake, whatever it hits next."""

    def allocate(self, name: str, stream: Stream) -> Block:
        """Memory for what `stream` does next; it may be memory that was freed."""
        return Block(name, stream.name, dict(self._freed[stream.name]))

    def adopt(self, name: str, stream: Stream) -> Block:
        """Memory that was there before anyone looked: it is no reuse."""
        return Block(name, stream.name, {})

    def pin(self, name: str, stream: Stream, *, is_kept: bool = True) -> Block:
        """Memory of the host that streams copy from and to."""
        block = Block(name, stream.name, {}, is_pinned=True)
        block.is_kept = is_kept
        return block

    def access_on_host(self, block: Block, access: Access, host: Clock) -> None:
        """Note that the host itself reads or writes pinned memory; `host` is what this thread waited for."""
        for before in block.accesses() if access.writes else block.writes:
            if before.span.overlaps(access.span) and not host.covers(*before.point):
                self._report(Finding(Kind.RACE, f"{block.name}: {access} is not ordered after the {before}"))
        block.add(access)

    def free(self, block: Block, host: Clock | None = None) -> None:
        """Give the block back to the stream that it belongs to; a second call does nothing.

        Args:
            block: the block.
            host: what the host has waited for; for memory of the host.
        """
        if block.is_freed:
            return
        block.is_freed = True
        if block.is_pinned:  # torch waits for the copies before it gives such memory to anybody
            for access in () if block.is_kept else block.accesses():
                if access.point.stream.startswith(HOST):
                    continue  # threads that are done with it have let it go
                if not (host or Clock()).covers(*access.point):
                    text = f"{block.name}: its end is not ordered after the {access}"
                    self._report(Finding(Kind.FREED, text))
            return
        pool = self._freed[block.stream]
        for access in block.accesses():
            stream, tick = access.point
            if stream not in pool or pool[stream].access.point.tick < tick:
                pool[stream] = _Hazard(access, block.name)

    def access(self, block: Block, stream: Stream, access: Access) -> None:
        """Note an access that `stream` has just been given."""
        if block.is_freed:
            self._report(Finding(Kind.FREED, f"{block.name}: {access} after its end"))
        for hazard in block.hazards_of(stream):
            key = hazard.access.point, stream.name
            if key in self._reported:
                continue
            self._reported.add(key)
            text = f"{block.name} may be the memory of {hazard.block}: {access} is not ordered after the "
            self._report(Finding(Kind.REUSE, text + str(hazard.access)))
        for before in block.accesses() if access.writes else block.writes:
            if before.span.overlaps(access.span) and not stream.has_seen(before.point):
                self._report(Finding(Kind.RACE, f"{block.name}: {access} is not ordered after the {before}"))
        block.add(access)
