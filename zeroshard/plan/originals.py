"""The parameters of a module before it is sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zeroshard.plan.cuts import Cut
from zeroshard.plan.placement import SUMMANDS, Placed, Placements

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Original:
    """A parameter of the module before sharding, and every place that holds it."""

    parameter: nn.Parameter
    fqn: str
    owners: tuple[tuple[nn.Module, str], ...]
    """Pairs (module, attribute); several for a tied parameter."""
    cut: Cut | None = None
    """The cut over the ranks of a tensor group, which hold a part each; None if each holds all of it."""
    summands: Placed = field(default_factory=lambda: SUMMANDS)
    """The gradient that autograd gives; also over tensor ranks if each holds all and computes a summand."""
    compute_dtype: torch.dtype | None = None
    """The dtype of forward and backward that was asked for by its name; None: the dtype of all parameters."""
    placements: Placements | None = None
    """The row of a frozen parameter that each rank is to hold whole at all stages; None: the stage's."""
    holders: tuple[int, ...] = ()
    """The pipeline ranks that hold it, if several chunks use it: each computes a summand of its gradient."""

    @property
    def shape(self) -> torch.Size:
        """The shape of what this rank computes with."""
        return self.parameter.shape if self.cut is None else _size(self.cut.local_shape)

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the parameter of the model."""
        return self.parameter.shape if self.cut is None else _size(self.cut.shape)

    @property
    def numel(self) -> int:
        """Elements of what this rank computes with."""
        return math.prod(self.shape)


def _size(shape: Sequence[int]) -> torch.Size:
    import torch  # with a model; an estimate of a number comes without

    return torch.Size(shape)


def is_coded(parameter: Tensor) -> bool:
    """True for a weight whose layer knows what its codes stand for.

    These are weights of bitsandbytes with 4 or 8 bits, quantized or not yet.
    """
    return any(hasattr(parameter, name) for name in ("quant_state", "SCB"))


def is_packed(parameter: Tensor) -> bool:
    """True for the codes of a quantized weight, which are never cast.

    They are integers, or values of any dtype whose `quant_state` says how bitsandbytes has packed them.
    """
    return not parameter.is_floating_point() or getattr(parameter, "quant_state", None) is not None


def computes_in_own_dtype(module: nn.Module) -> bool:
    """True for torch's BatchNorm: its inputs and parameters are not cast."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return isinstance(module, _BatchNorm)


def is_table(module: nn.Module) -> bool:
    """True for torch's Embedding, whose backward needs the indices alone."""
    from torch import nn

    return type(module) is nn.Embedding


def counts(original: Original, tp_rank: int, pp_rank: int | None = None) -> bool:
    """True for the one of several ranks with the same values that counts them, as in norms.

    Args:
        original: the parameter.
        tp_rank: the tensor rank.
        pp_rank: the pipeline rank; None for one answer on each pipeline rank that holds the parameter.
    """
    is_first = pp_rank is None or not original.holders or pp_rank == original.holders[0]
    return is_first and (tp_rank == 0 or original.cut is not None)
