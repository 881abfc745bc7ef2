"""ZeRO stages as data (Rajbhandari et al. 2020, "ZeRO", section 5): what lies where between uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """How a tensor lies over the data-parallel ranks."""

    REPLICATE = "replicate"
    SHARD = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """The three kinds of model state of one stage.

    What follows from a row:
      - a sharded parameter is gathered before use and freed after it;
      - a replicated parameter with a sharded optimizer is gathered again after each optimizer step;
      - a sharded gradient is reduced as soon as it arrives, in every backward;
      - a replicated gradient is added up locally until the accumulation boundary;
      - a replicated optimizer needs the whole reduced gradient on every rank.
    """

    parameter: Placement
    """The unsharded parameters in the compute dtype, at rest."""
    gradient: Placement
    """Gradients between the micro-batches of a step."""
    optimizer: Placement
    """Main parameters, the gradients that the optimizer reads, and its states."""

    @property
    def frees_parameters(self) -> bool:
        return self.parameter is Placement.SHARD

    @property
    def accumulates_locally(self) -> bool:
        return self.gradient is Placement.REPLICATE

    @property
    def gathers_gradients(self) -> bool:
        return self.optimizer is Placement.REPLICATE


_R, _S = Placement.REPLICATE, Placement.SHARD

STAGES: tuple[Placements, ...] = (
    Placements(parameter=_R, gradient=_R, optimizer=_R),
    Placements(parameter=_R, gradient=_R, optimizer=_S),
    Placements(parameter=_R, gradient=_S, optimizer=_S),
    Placements(parameter=_S, gradient=_S, optimizer=_S),
)
"""Stage 0 (data parallel), 1 (optimizer states), 2 (and gradients), 3 (and parameters)."""
