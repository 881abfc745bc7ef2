"""The collectives that lead from one placement to another, as data.

    a gather      {dp_shard: SHARD}    ->  {}                 all-gather over dp_shard
    a reduction   {dp_shard: PARTIAL}  ->  {dp_shard: SHARD}  reduce-scatter over dp_shard
    an all-reduce {dp_shard: PARTIAL}  ->  {}                 reduce-scatter, then all-gather, over dp_shard

An axis of one rank has no exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, TP, Placed, Placement

_AXES = (DP_INNER, DP_SHARD, DP_REPLICATE, TP)
"""The axes in the order in which sums are scattered. Over the last axis the least is sent."""


class Collective(Enum):
    """The kinds of exchanges. The values are the keys of a `CommReport`."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


class Exchange(NamedTuple):
    """One collective."""

    collective: Collective
    axis: str


def exchanges(before: Placed, after: Placed, sizes: Mapping[str, int]) -> tuple[Exchange, ...]:
    """List the collectives that lead from one placement to another.

    First sums are scattered, then parts are gathered, in the opposite order of axes.

    Args:
        before, after: the placements of a tensor before and after the exchanges.
        sizes: the number of ranks of each axis; 1 for an axis that is left out.
    """
    axes = [axis for axis in _AXES if sizes.get(axis, 1) > 1]
    scattered = [axis for axis in axes if before.get(axis) is Placement.PARTIAL is not after.get(axis)]
    gathered = [axis for axis in axes if _is_split(before, axis) and not _is_split(after, axis)]
    return (
        *(Exchange(Collective.REDUCE_SCATTER, axis) for axis in scattered),
        *(Exchange(Collective.ALL_GATHER, axis) for axis in reversed(gathered)),
    )


def _is_split(placed: Placed, axis: str) -> bool:
    return placed.get(axis, Placement.REPLICATE) is not Placement.REPLICATE
