from __future__ import annotations

from tests.pretend.clocks import Stream, Timeline
from tests.pretend.findings import Finding, Kind
from tests.pretend.memory import Access, Allocator, Block, Span

WHOLE = Span(0, 8)


class Memory:
    """An allocator, two streams, and the kinds of what was found."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self.allocator = Allocator(self._findings.append)
        timeline = Timeline()
        self.a, self.b, self.c = (timeline.stream(name) for name in "abc")

    def write(self, block: Block, stream: Stream, span: Span = WHOLE) -> None:
        self.allocator.access(block, stream, Access(stream.issue(), "kernel", True, span))

    def read(self, block: Block, stream: Stream, span: Span = WHOLE) -> None:
        self.allocator.access(block, stream, Access(stream.issue(), "kernel", False, span))

    @property
    def kinds(self) -> list[Kind]:
        return [finding.kind for finding in self._findings]


def test_a_write_races_with_every_read_that_it_is_not_ordered_after() -> None:
    memory = Memory()
    block = memory.allocator.adopt("x", memory.a)
    memory.read(block, memory.a)
    memory.read(block, memory.b)
    memory.write(block, memory.c)
    assert memory.kinds == [Kind.RACE, Kind.RACE]


def test_spans_that_do_not_overlap_do_not_race() -> None:
    memory = Memory()
    block = memory.allocator.allocate("x", memory.a)
    memory.write(block, memory.a, Span(0, 4))
    memory.write(block, memory.b, Span(4, 8))
    assert memory.kinds == []
    memory.read(block, memory.a, Span(3, 5))
    assert memory.kinds == [Kind.RACE]


def test_a_write_to_a_part_leaves_earlier_writes_to_the_rest() -> None:
    memory = Memory()
    block = memory.allocator.allocate("x", memory.a)
    memory.write(block, memory.a)
    memory.b.wait_stream(memory.a)
    memory.write(block, memory.b, Span(0, 4))
    memory.c.wait_stream(memory.b)
    memory.read(block, memory.c, Span(4, 8))
    assert memory.kinds == []
    memory.read(block, memory.a, Span(4, 8))
    assert memory.kinds == []
    memory.read(block, memory.a, Span(0, 8))
    assert memory.kinds == [Kind.RACE]


def test_the_wait_may_also_come_after_the_memory_was_freed() -> None:
    memory = Memory()
    block = memory.allocator.allocate("x", memory.a)
    memory.b.wait_stream(memory.a)
    memory.read(block, memory.b)
    memory.allocator.free(block)
    again = memory.allocator.allocate("y", memory.a)
    memory.a.wait_stream(memory.b)
    memory.write(again, memory.a)
    assert memory.kinds == []


def test_memory_is_only_reused_on_the_stream_that_it_was_allocated_on() -> None:
    memory = Memory()
    block = memory.allocator.allocate("x", memory.a)
    memory.write(block, memory.a)
    memory.allocator.free(block)
    memory.write(memory.allocator.allocate("y", memory.b), memory.b)
    assert memory.kinds == []


def test_one_early_reuse_is_reported_once_however_many_blocks_it_may_hit() -> None:
    memory = Memory()
    block = memory.allocator.allocate("x", memory.a)
    memory.read(block, memory.b)
    memory.allocator.free(block)
    for _ in range(3):
        memory.write(memory.allocator.allocate("y", memory.a), memory.a)
    assert memory.kinds == [Kind.REUSE]


def test_a_finding_names_the_block_both_accesses_and_both_streams() -> None:
    findings: list[Finding] = []
    allocator, timeline = Allocator(findings.append), Timeline()
    a, b = timeline.stream("a"), timeline.stream("b")
    block = allocator.allocate("full of 'blocks.0'", a)
    allocator.access(block, a, Access(a.issue(), "all-gather", True, WHOLE))
    allocator.access(block, b, Access(b.issue(), "mm", False, WHOLE))
    assert str(findings[0]) == (
        "race: full of 'blocks.0': read by mm on b is not ordered after the write by all-gather on a"
    )
