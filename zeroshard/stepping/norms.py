"""2-norms of whole parameters; a rank may hold slices of them.

Squares are added up in float64, so that results of a norm do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from zeroshard.comm import moves
from zeroshard.comm.mesh import Axes
from zeroshard.internals.foreach import foreach_sum_of_squares
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.originals import counts
from zeroshard.sharding.buffer import FlatBuffer

Norms = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(parameters, tensors) -> [n] float64: the norm of each tensor, which has the shape of its parameter."""

_Place = TypeVar("_Place")

_CHUNK = 1 << 16
"""Elements that a CPU converts to float64 at a time. A whole tensor at once takes ten times as long: the copy
is new memory and leaves the cache."""


@runtime_checkable
class UsesNorms(Protocol):
    """An optimizer whose update of an element needs norms of whole parameters."""

    norms_of: Norms
    """The function that gives norms: `whole_norms` until ranks share the parameters."""


def sum_of_powers(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """[n], float64: of each tensor, the sum of its magnitudes to the power of `order`, above 0 and finite.

    All tensors are on one device. A CPU goes through a tensor in chunks; an accelerator takes the kernels of
    `foreach_sum_of_squares` for squares.
    """
    if order == 2.0 and not tensors[0].is_cpu:
        return foreach_sum_of_squares(tensors)
    return torch.stack([_sum_in_chunks(tensor, order) for tensor in tensors])


@torch.no_grad()
def whole_norms(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """`Norms` for a process that holds every parameter whole."""
    refuse_slices(parameters, "norms of whole parameters")
    return sum_of_powers(tensors).sqrt()


def refuse_slices(parameters: Iterable[Tensor], what: str) -> None:
    """Refuse parameters of which this rank holds a slice, where it computes by itself.

    Raises:
        RuntimeError: the name of the first one.
    """
    for parameter in parameters:
        if isinstance(parameter, ShardedParameter) and parameter.is_partial:
            raise RuntimeError(
                f"{what}: this rank holds a slice of '{parameter.fqn}'. Hand the optimizer to "
                "zeroshard.initialize, or to attach() of what zeroshard.shard returns"
            )


def place_among(places: Mapping[ShardedParameter, _Place], parameter: Tensor, what: str) -> _Place:
    """Return the place of a parameter among the parameters of one module.

    Raises:
        RuntimeError: it is not one of them.
    """
    place = places.get(parameter) if isinstance(parameter, ShardedParameter) else None
    if place is None:
        raise RuntimeError(
            f"{what}: expected parameters of the one sharded module that the optimizer was attached to last, "
            f"got {name_of(parameter)} of shape {list(parameter.shape)} of another module, or an ignored "
            "one: step it by an optimizer of its own"
        )
    return place


def name_of(parameter: Tensor) -> str:
    """Return the name of a parameter for messages."""
    return f"'{parameter.fqn}'" if isinstance(parameter, ShardedParameter) else "a parameter"


class NormsOverRanks:
    """`Norms` of sharded parameters, the same bits on all ranks; two exchanges a call, on all ranks alike.

    Each rank adds up the squares of the elements that the layout gives it, at every stage alike. Parameters
    that are cut over tensor ranks are added up over these too; of others the first tensor rank counts the
    elements. Pipeline ranks that hold the same parameter have its norm each, without an exchange.
    """

    def __init__(self, buffers: Iterable[FlatBuffer], axes: Axes) -> None:
        self._axes, self._device = (axes.dp_shard, axes.tp), axes.dp_shard.device
        self._own = {
            p: buffer.owned(at) if counts(buffer.originals[at], axes.tp.rank) else slice(0, 0)
            for buffer in buffers
            for at, p in enumerate(buffer.sharded)
        }

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        what = "norms of whole parameters"
        own = [t[place_among(self._own, p, what)] for p, t in zip(parameters, tensors, strict=True)]
        squares: dict[int, Tensor] = {}
        for group in moves.by_device(own):
            found = moves.to_device(sum_of_powers([own[index] for index in group]), self._device)
            squares |= zip(group, found.unbind(), strict=True)
        total = torch.stack([squares[index] for index in range(len(own))])
        for axis in self._axes:
            total = axis.sum(total, "sum of the squared norms of parameters")()
        return total.sqrt()


def _sum_in_chunks(tensor: Tensor, order: float) -> Tensor:
    """0-dim, float64: the sum of magnitudes to the power of `order`."""
    chunks = tensor.reshape(-1).split(_CHUNK)
    norms = [torch.linalg.vector_norm(chunk, order, dtype=torch.float64) for chunk in chunks]
    return torch.stack(norms).pow(order).sum()
