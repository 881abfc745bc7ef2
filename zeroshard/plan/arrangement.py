"""The places of ranks on the axes of the mesh: integers in, integers out.

The axes are pp, dp_replicate, dp_shard and tp. Ranks are counted in the order of Megatron-LM: along tp first,
then along the data-parallel axes, along pp last. So the ranks that exchange most are neighbours, and lie in
one node if its size allows it. Eight ranks with pp=2 and tp=2 have 8 // (2 * 2) = 2 data-parallel ranks:

                 tp 0   tp 1
    pp 0  dp 0     0      1      a row is a tensor group: 0 1
          dp 1     2      3      a column of a block is a data group: 0 2
    pp 1  dp 0     4      5      the same place of each block is a pipeline group: 0 4
          dp 1     6      7

Hybrid sharding divides the data-parallel ranks: a shard group is a run of them (dp_shard), and the ranks with
the same place in their shard groups hold the same shard (dp_replicate).

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", and `initialize_model_parallel` of Megatron-LM, whose order is tp, dp, pp.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

from zeroshard.plan.placement import DP_REPLICATE, DP_SHARD

PP = "pp"
"""The axis over which a model is divided by its layers (pipeline); `TP` divides each layer (tensor)."""

DATA = (DP_REPLICATE, DP_SHARD)
"""The axes over which a batch is divided."""


class PerAxis(NamedTuple):
    """A number for each axis, from the slowest to the fastest one."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int


AXES = PerAxis._fields


@dataclass(frozen=True)
class Arrangement:
    """The arrangement of `num_ranks` ranks along the axes of the mesh.

    Args:
        num_ranks: all ranks.
        pp: ranks along the pipeline axis.
        tp: ranks along the tensor axis.
        shard_group_size: data-parallel ranks in a shard group. None: all of them are one group.

    Raises:
        ValueError: no rank, or numbers that do not divide `num_ranks`.
    """

    num_ranks: int
    pp: int = 1
    tp: int = 1
    shard_group_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks: expected at least 1 rank, got {self.num_ranks}")
        divisor = self.num_parts * (self.shard_group_size or 1)
        if self.num_ranks % divisor:
            asked = {"mesh.pp": self.pp, "mesh.tp": self.tp, "shard_group_size": self.shard_group_size}
            keys = ", ".join(f"{key}={number}" for key, number in asked.items() if number not in (1, None))
            raise ValueError(
                f"{self.num_ranks} rank(s) cannot be arranged with {keys}: expected a multiple of {divisor}"
            )

    @property
    def num_parts(self) -> int:
        """Parts into which the pipeline and tensor axes divide the model."""
        return self.pp * self.tp

    @property
    def num_data(self) -> int:
        """Data-parallel ranks, which train the same part of the model."""
        return self.num_ranks // self.num_parts

    @cached_property
    def sizes(self) -> PerAxis:
        """The number of ranks along each axis."""
        shard = self.num_data if self.shard_group_size is None else self.shard_group_size
        return PerAxis(pp=self.pp, dp_replicate=self.num_data // shard, dp_shard=shard, tp=self.tp)

    def coordinates(self, rank: int) -> PerAxis:
        """Return the place of a rank on each axis."""
        places = product(*map(range, self.sizes))  # in the order of ranks
        return PerAxis(*next(islice(places, rank, None)))

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups that exchange along some axes together; each rank is in one of them.

        `groups(TP)` gives tensor groups. `groups(*DATA)` gives for each part of the model the ranks that
        train it, and `groups(PP, TP)` for each copy of the model the ranks that hold it.
        """
        return groups_along(self.sizes, AXES, axes)


def groups_along(sizes: Sequence[int], names: Sequence[str], axes: Collection[str]) -> list[list[int]]:
    """Return the groups of a mesh whose ranks differ on some axes alone; each rank is in one of them.

    Args:
        sizes: the number of ranks of each axis of the mesh, the fastest axis last.
        names: the names of these axes.
        axes: the names of the axes on which the ranks of a group differ.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*map(range, sizes))):
        common = tuple(at for name, at in zip(names, place, strict=True) if name not in axes)
        groups.setdefault(common, []).append(rank)
    return list(groups.values())
