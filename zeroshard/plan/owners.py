"""Owners of whole tensors that ranks hold in slices, and what each rank sends: integers in, integers out.

An item is a tensor that one rank, its owner, computes with as a whole. Each rank holds a range of it:

    item 0    elements 0 ... 600    rank 0 [0, 512)   rank 1 [512, 600)   owner 0
    inward    rank 1 sends [512, 600) to rank 0, which computes
    outward   rank 0 sends [512, 600) of the result to rank 1

Ranges of several ranks may overlap, or be the same: where ranks hold an item whole, nothing is sent inward.

[Note: Choice of owners] The costs of ranks should be equal, because all of them wait for the slowest. Among
ranks that are about equally busy, the owner is the rank that holds most of the item, so that the least is
sent. First the costs are divided by the rule of the longest processing time: the item of the highest cost
goes to the least busy rank, and so on (Graham 1969, "Bounds on Multiprocessing Timing Anomalies", theorem 2:
the busiest of N ranks has at most 4/3 - 1/(3 N) of the least possible). Then items are dealt again, in the
same order, to the rank that holds most of each, among those that stay below `1 + SLACK` times the busiest
rank of before. If the last items find no such rank, the first division is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zeroshard.plan.layout import Span

SLACK = 1 / 16
"""The share by which the busiest rank may be busier than without regard to the ranges that ranks hold: a step
may take so much longer, to send less."""


class Item(NamedTuple):
    """A tensor that one rank computes with as a whole."""

    size: int
    """Elements."""
    cost: int
    """The cost of its computation, in any unit."""
    held: tuple[Span, ...]
    """The range of its elements that each rank holds, by rank; together all of them."""


class Send(NamedTuple):
    """A range of an item that one rank sends to another."""

    item: int
    source: int
    target: int
    span: Span


def choose_owners(items: Sequence[Item], num_ranks: int, kept: Mapping[int, int] | None = None) -> list[int]:
    """Choose the rank that computes each item; see [Note: Choice of owners].

    Args:
        items: the items, the same on all ranks.
        num_ranks: the number of ranks.
        kept: the owners of items that stay where they are, by the number of the item. The bound of the note
            holds if there are none.

    Returns:
        The owner of each item.
    """
    kept = kept or {}
    order = sorted(set(range(len(items))) - kept.keys(), key=lambda number: (-items[number].cost, number))
    loads = [0] * num_ranks
    for number, rank in kept.items():
        loads[rank] += items[number].cost
    ranks = range(num_ranks)

    def least_busy(item: Item, busy: Sequence[int]) -> int:
        return min(ranks, key=busy.__getitem__)

    def holds_most(item: Item, busy: Sequence[int]) -> int:
        fits = [rank for rank in ranks if busy[rank] + item.cost <= most]
        return min(fits or ranks, key=lambda rank: (-item.held[rank].size, busy[rank], rank))

    chosen, busy = _deal(items, order, loads, least_busy)
    most = max(busy) + int(SLACK * max(busy))
    dealt, busy = _deal(items, order, loads, holds_most)
    if max(busy) <= most:  # every item had a rank that it fits
        chosen = dealt
    return [kept[number] if number in kept else chosen[number] for number in range(len(items))]


def _deal(
    items: Sequence[Item],
    order: Sequence[int],
    loads: Sequence[int],
    choose: Callable[[Item, Sequence[int]], int],
) -> tuple[dict[int, int], list[int]]:
    """Deal items to ranks, each to the rank that `choose` gives; return the owners, and the loads then."""
    owners, busy = {}, list(loads)
    for number in order:
        owner = owners[number] = choose(items[number], busy)
        busy[owner] += items[number].cost
    return owners, busy


def inward(items: Sequence[Item], owners: Sequence[int]) -> list[Send]:
    """List what owners get before they compute: each element that an owner does not hold, once.

    Of several ranks that hold an element, the one sends it whose number has most leading bits in common with
    the number of the owner: ranks of one machine have neighbouring numbers.
    """
    moves = []
    for number, (item, owner) in enumerate(zip(items, owners, strict=True)):
        missing = _without([Span(0, item.size)], item.held[owner])
        others = range(len(item.held)) if missing else ()
        for rank in sorted(others, key=lambda rank: rank ^ owner):
            found = [piece for gap in missing if (piece := gap.intersect(item.held[rank])).size]
            if rank != owner and found:
                moves += [Send(number, rank, owner, piece) for piece in found]
                missing = _without(missing, item.held[rank])
        assert not missing, "the ranks hold all elements"
    return moves


def outward(items: Sequence[Item], owners: Sequence[int]) -> list[Send]:
    """List what owners send when they have computed: to each rank the range that it holds."""
    return [
        Send(number, owner, rank, span)
        for number, (item, owner) in enumerate(zip(items, owners, strict=True))
        for rank, span in enumerate(item.held)
        if rank != owner and span.size
    ]


def _without(spans: Sequence[Span], taken: Span) -> list[Span]:
    """Return what is left of ranges without another range."""
    left = []
    for span in spans:
        common = span.intersect(taken)
        if not common.size:
            left.append(span)
            continue
        pieces = Span(span.start, common.start), Span(common.stop, span.stop)
        left += [piece for piece in pieces if piece.size]
    return left
