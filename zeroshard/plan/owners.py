"""Owners of whole tensors that ranks hold in slices, and what each rank sends: integers in, integers out.

An item is a tensor that one rank, its owner, computes with as a whole. Each rank holds a range of it:

    item 0    elements 0 ... 600    rank 0 [0, 512)   rank 1 [512, 600)   owner 0
    inward    rank 1 sends [512, 600) to rank 0, which computes
    outward   rank 0 sends [512, 600) of the result to rank 1

Ranges of several ranks may be the same, and overlap in no other way. Where each rank holds an item whole,
nothing is sent inward.

[Note: Choice of owners] The costs of ranks should be equal, because all of them wait for the slowest. Among
ranks that are about equally busy, the owner is the rank that holds most of the item, so that the least is
sent. First the costs are divided by the rule of the longest processing time: the item of the highest cost
goes to the least busy rank, and so on (Graham 1969, "Bounds on Multiprocessing Timing Anomalies", theorem 2:
the busiest of N ranks has at most 4/3 - 1/(3 N) of the least possible). Then items are dealt again, in the
same order, to the rank that holds most of each, among those that stay below `1 + SLACK` times the busiest
rank of before. If the last items find no such rank, the first division is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def choose_owners(items: Sequence[Item], num_ranks: int, kept: Mapping[int, int]) -> list[int]:
    """Choose the rank that computes each item; see [Note: Choice of owners].

    Args:
        items: the items, the same on all ranks.
        num_ranks: the number of ranks.
        kept: the owners of items that stay where they are, by the number of the item. The bound of the note
            holds if there are none.

    Returns:
        The owner of each item.
    """
    order = sorted(set(range(len(items))) - kept.keys(), key=lambda number: (-items[number].cost, number))

    def deal(most: int) -> tuple[dict[int, int], int]:
        """Deal the items to ranks that stay below a cost, else to the least busy; with the highest cost."""
        owners, busy = dict(kept), [0] * num_ranks
        for number, rank in kept.items():
            busy[rank] += items[number].cost
        for number in order:
            item = items[number]
            fits = [rank for rank in range(num_ranks) if busy[rank] + item.cost <= most]
            by_held = min(fits, key=lambda rank: (-item.held[rank].size, busy[rank], rank), default=None)
            owner = owners[number] = busy.index(min(busy)) if by_held is None else by_held
            busy[owner] += item.cost
        return owners, max(busy)

    owners, highest = deal(-1)
    most = highest + int(SLACK * highest)
    dealt, highest = deal(most)
    chosen = dealt if highest <= most else owners  # every item had a rank that it fits
    return [chosen[number] for number in range(len(items))]


def inward(items: Sequence[Item], owners: Sequence[int]) -> list[Send]:
    """List what owners get before they compute: each element that an owner does not hold, once.

    Of several ranks that hold an element, the one sends it whose number has most leading bits in common with
    the number of the owner: ranks of one machine have neighbouring numbers.
    """
    sends = []
    for number, (item, owner) in enumerate(zip(items, owners, strict=True)):
        holders: dict[Span, list[int]] = {}
        for rank, span in enumerate(item.held):
            if span.size and span != item.held[owner]:
                holders.setdefault(span, []).append(rank)
        assert item.held[owner].size + sum(span.size for span in holders) == item.size, "it is held in parts"
        sends += [Send(number, min(ranks, key=owner.__xor__), owner, span) for span, ranks in holders.items()]
    return sends


def outward(items: Sequence[Item], owners: Sequence[int]) -> list[Send]:
    """List what owners send when they have computed: to each rank the range that it holds."""
    return [
        Send(number, owner, rank, span)
        for number, (item, owner) in enumerate(zip(items, owners, strict=True))
        for rank, span in enumerate(item.held)
        if rank != owner and span.size
    ]
