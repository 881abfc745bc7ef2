"""Compare the collectives that ranks issued: one order for each communicator, and no cycle over several.

A collective ends when all members of its communicator have begun it. It begins on a rank when everything
before it in its stream has ended, other ranks' parts included. So on each rank "begins after" is an edge
between collectives, the edges of all ranks form one graph, and a cycle in it is a deadlock. Two
communicators that get in each other's way because a device cannot run both at once are not modelled.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from tests.pretend.clocks import Clock, Point
from tests.pretend.findings import Finding, Kind


class Collective(NamedTuple):
    """One collective as one rank issued it."""

    communicator: str
    members: tuple[int, ...]
    op: str
    label: str
    numel: int
    dtype: str
    point: Point
    """Its place in the stream that it runs on."""
    begins_after: Clock

    @property
    def signature(self) -> tuple[str, str, int, str]:
        """What must be the same on all ranks."""
        return self.op, self.label, self.numel, self.dtype

    def __str__(self) -> str:
        return f"{self.op} of {self.numel} {self.dtype} ({self.label})"


class _Node(NamedTuple):
    """A collective, all its ranks together."""

    communicator: str
    op: str
    label: str
    number: int

    def __str__(self) -> str:
        return f"{self.op} ({self.label}) of {self.communicator}"


def check_orders(by_rank: Sequence[Sequence[Collective]]) -> list[Finding]:
    """Find what would hang or mix memory, from the collectives of each rank in the order of their issue."""
    sequences: dict[str, dict[int, list[Collective]]] = defaultdict(dict)
    members: dict[str, tuple[int, ...]] = {}
    for rank, sequence in enumerate(by_rank):
        for collective in sequence:
            members[collective.communicator] = collective.members
            sequences[collective.communicator].setdefault(rank, []).append(collective)
    found: list[Finding] = []
    for communicator, of_ranks in sequences.items():
        found += _compare(communicator, {rank: of_ranks.get(rank, []) for rank in members[communicator]})
    return found + _find_cycle(by_rank)


def _compare(communicator: str, of_ranks: Mapping[int, Sequence[Collective]]) -> list[Finding]:
    """The first difference between the first member and another one."""
    first_rank, *others = of_ranks
    first = of_ranks[first_rank]
    for rank in others:
        other = of_ranks[rank]
        at = _first_difference(first, other)
        if at is None:
            continue
        is_permuted = Counter(c.signature for c in first) == Counter(c.signature for c in other)
        text = (
            f"{communicator}: collective {at} is {_describe(first, at)} on rank {first_rank} and "
            f"{_describe(other, at)} on rank {rank}; "
            f"{'the same ones in another order' if is_permuted else 'not the same collectives'}"
        )
        return [Finding(Kind.ORDER, text)]
    return []


def _first_difference(first: Sequence[Collective], other: Sequence[Collective]) -> int | None:
    for at, (a, b) in enumerate(zip(first, other, strict=False)):
        if a.signature != b.signature:
            return at
    return None if len(first) == len(other) else min(len(first), len(other))


def _describe(sequence: Sequence[Collective], at: int) -> str:
    return str(sequence[at]) if at < len(sequence) else "nothing more"


def _find_cycle(by_rank: Sequence[Sequence[Collective]]) -> list[Finding]:
    graph: dict[_Node, set[_Node]] = defaultdict(set)
    for sequence in by_rank:
        for node, before in _edges(sequence):
            graph[node].add(before)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [Finding(Kind.CYCLE, " -> ".join(str(node) for node in error.args[1]))]
    return []


def _edges(sequence: Sequence[Collective]) -> list[tuple[_Node, _Node]]:
    """Pairs of a collective and one after which it begins on this rank; others follow from these."""
    edges: list[tuple[_Node, _Node]] = []
    num_seen: Counter[tuple[str, str, str]] = Counter()
    last: dict[str, _Node] = {}
    issued: dict[str, tuple[list[int], list[_Node]]] = defaultdict(lambda: ([], []))
    for collective in sequence:
        key = collective.communicator, collective.op, collective.label
        node = _Node(*key, num_seen[key])
        num_seen[key] += 1
        for stream, tick in collective.begins_after.items():
            ticks, nodes = issued[stream]
            if at := bisect.bisect_right(ticks, tick):
                edges.append((node, nodes[at - 1]))
        if collective.communicator in last:
            edges.append((node, last[collective.communicator]))
        last[collective.communicator] = node
        ticks, nodes = issued[collective.point.stream]
        ticks.append(collective.point.tick)
        nodes.append(node)
    return edges
