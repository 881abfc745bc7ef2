from __future__ import annotations

from tests.pretend.clocks import Clock, Stream, Timeline
from tests.pretend.findings import Kind
from tests.pretend.orders import Collective, check_orders


class Rank:
    """One rank's streams, and the collectives that it has issued."""

    def __init__(self) -> None:
        timeline = Timeline()
        self.gather, self.reduce = timeline.stream("gather"), timeline.stream("reduce")
        self.issued: list[Collective] = []

    def issue(
        self, communicator: str, label: str, stream: Stream, members: tuple[int, ...] = (0, 1), numel: int = 8
    ) -> None:
        begins_after = Clock(stream.clock)
        self.issued.append(
            Collective(communicator, members, "op", label, numel, "float32", stream.issue(), begins_after)
        )


def kinds(*ranks: Rank) -> list[Kind]:
    return [finding.kind for finding in check_orders([rank.issued for rank in ranks])]


def test_a_collective_that_one_rank_never_issues_is_found() -> None:
    first, second = Rank(), Rank()
    first.issue("g", "a", first.gather)
    first.issue("g", "b", first.gather)
    second.issue("g", "a", second.gather)
    found = check_orders([first.issued, second.issued])
    assert "nothing more on rank 1; not the same collectives" in found[0].text


def test_sizes_that_differ_are_found() -> None:
    first, second = Rank(), Rank()
    first.issue("g", "a", first.gather, numel=8)
    second.issue("g", "a", second.gather, numel=9)
    assert kinds(first, second) == [Kind.ORDER]


def test_a_cycle_over_three_ranks_and_three_communicators_is_found() -> None:
    ranks = [Rank() for _ in range(3)]
    pairs = {"x": (0, 1), "y": (1, 2), "z": (0, 2)}
    for rank, (before, after) in zip(ranks, [("x", "z"), ("y", "x"), ("z", "y")], strict=True):
        rank.issue(before, before, rank.gather, members=pairs[before])
        rank.issue(after, after, rank.gather, members=pairs[after])
    assert kinds(*ranks) == [Kind.CYCLE]
