"""ZeRO stages as data (Rajbhandari et al. 2020, "ZeRO", section 5): what lies where between uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """What follows from a stage for one flat buffer of parameters."""

    compute_dtype: torch.dtype
    """Of the unsharded parameters."""
    main_dtype: torch.dtype
    """Of the main parameters and the gradients that the optimizer reads."""
    reduce_dtype: torch.dtype
    """Of gradients on the wire."""
    is_resident: bool
    """True if the unsharded parameters are there all the time."""
    is_partial: bool
    """True if a rank holds only its shard of the main parameters."""

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of optimizer states, updates, and sums of gradients: the main dtype, but at least float32."""
        return torch.promote_types(self.main_dtype, torch.float32)

    @property
    def is_alias(self) -> bool:
        """True if the main parameters are a view of the unsharded ones."""
        return self.is_resident and self.main_dtype == self.compute_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePolicy:
    """The dtypes that the user asked for; None is explained at each."""

    param_dtype: torch.dtype | None
    """To compute in; None: each parameter's own."""
    reduce_dtype: torch.dtype | None
    """Of gradients on the wire; None: the compute dtype, but at least float32."""
    main_dtype: torch.dtype | None
    """Of main parameters; None: the given dtype, but at least float32. Frozen ones need none."""

    def where(self, keeps_dtype: bool) -> DtypePolicy:
        """The policy for a parameter that may have to be computed with in its own dtype."""
        return replace(self, param_dtype=None) if keeps_dtype else self


def plan_buffer(
    placements: Placements, dtypes: DtypePolicy, given: torch.dtype, trainable: bool, num_ranks: int
) -> BufferPlan:
    """Apply a stage to parameters of dtype `given`."""
    compute = dtypes.param_dtype or given
    main = (dtypes.main_dtype or torch.promote_types(given, torch.float32)) if trainable else compute
    replicated = placements.gathers_gradients if trainable else not placements.frees_parameters
    return BufferPlan(
        compute_dtype=compute,
        main_dtype=main,
        reduce_dtype=dtypes.reduce_dtype or torch.promote_types(compute, torch.float32),
        is_resident=not placements.frees_parameters or (num_ranks == 1 and main == compute),
        is_partial=num_ranks > 1 and not replicated,
    )
