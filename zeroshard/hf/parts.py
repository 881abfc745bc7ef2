"""The slices of tensors of all parts of a model that pipeline ranks hold, one after another on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.comm.mesh import Axes
from zeroshard.full.parts import Named
from zeroshard.full.parts import collect as collect_named


def collect(axes: Axes, own: Iterator[TensorSlice]) -> Iterator[TensorSlice]:
    """Yield whole tensors of all parts on rank 0; as `zeroshard.full.parts.collect` does it."""
    # map, unlike a loop, does not hold the last tensor while the next one is gathered.
    return map(_to_slice, collect_named(axes, map(_to_named, own)))


def _to_named(piece: TensorSlice) -> Named:
    return Named(piece.name, piece.data.view(piece.shape))


def _to_slice(named: Named) -> TensorSlice:
    return TensorSlice(named.name, tuple(named.values.shape), 0, named.values.reshape(-1))
