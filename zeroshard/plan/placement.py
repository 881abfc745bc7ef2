"""ZeRO stages as data (Rajbhandari et al. 2020, "ZeRO", section 5): the place of each kind of model state.

A *placement* says how a tensor lies over the ranks of one axis of the mesh. A stage is a row of a table: the
placements of each kind of model state. `exchange.py` derives the collectives from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

DP_REPLICATE, DP_SHARD, DP_INNER, TP = "dp_replicate", "dp_shard", "dp_inner", "tp"
"""The axes of the mesh. They run over the replicas of a shard group (hybrid sharding), the ranks of a shard
group, the ranks that share a copy of the parameters from forward to backward, and the ranks that compute
parts of a layer."""


class Placement(Enum):
    """The place of a tensor over the ranks of one axis."""

    REPLICATE = "replicate"
    """Each rank has all of it."""
    SHARD = "shard"
    """Each rank has one of equal, contiguous parts."""
    PARTIAL = "partial"
    """Each rank has a summand of all elements."""


Placed = Mapping[str, Placement]
"""Placements by the name of the axis. A tensor is replicated on an axis that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """The places of all kinds of model state at one stage."""

    parameter: Placed
    """The unsharded parameters in the compute dtype, at rest. Those with a place are gathered before use and
    freed after it."""
    kept: Placed
    """The unsharded parameters between a forward and its backward."""
    gradient: Placed
    """Gradients between the micro-batches of a step; as `SUMMANDS`, each rank adds its own up until then."""
    optimizer: Placed
    """Main parameters, the gradients that the optimizer reads, and its states."""


_WHOLE: Placed = {}
_SHARDED: Placed = {DP_SHARD: Placement.SHARD}
SUMMANDS: Placed = {DP_SHARD: Placement.PARTIAL, DP_REPLICATE: Placement.PARTIAL}
"""The gradients that autograd gives: each rank has the gradients of its own micro-batch."""
SUMMANDS_OF_PARTS: Placed = {**SUMMANDS, TP: Placement.PARTIAL}
"""The same for a parameter that all tensor ranks hold, and use in their parts of a layer."""

STAGES: tuple[Placements, ...] = (
    Placements(parameter=_WHOLE, kept=_WHOLE, gradient=SUMMANDS, optimizer=_WHOLE),
    Placements(parameter=_WHOLE, kept=_WHOLE, gradient=SUMMANDS, optimizer=_SHARDED),
    Placements(parameter=_WHOLE, kept=_WHOLE, gradient=_SHARDED, optimizer=_SHARDED),
    Placements(parameter=_SHARDED, kept=_SHARDED, gradient=_SHARDED, optimizer=_SHARDED),
)
"""Stage 0 (data parallel), 1 (optimizer states), 2 (and gradients), 3 (and parameters)."""

REPLICATED = STAGES[0]
"""The places of frozen parameters that each rank holds whole by choice."""


def place(stage: int, reshard_after_forward: bool | int, group_size: int) -> Placements:
    """Return the row of a stage.

    Args:
        stage: 0 to 3.
        reshard_after_forward: False keeps parameters gathered from forward to backward; a number keeps a copy
            among so many ranks, the secondary partition of ZeRO++ (Wang et al. 2023, section 4.2).
        group_size: ranks of the shard group.
    """
    row = STAGES[stage]
    if not row.parameter or reshard_after_forward is True or reshard_after_forward == group_size > 1:
        return row
    return replace(row, kept=_WHOLE if reshard_after_forward is False else {DP_INNER: Placement.SHARD})
