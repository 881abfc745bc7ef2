"""The slices of tensors of all parts of a model that pipeline ranks hold, one after another on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.comm.mesh import Axes
from zeroshard.full.parts import Named
from zeroshard.full.parts import collect as collect_named


def collect(axes: Axes, own: Iterator[TensorSlice]) -> Iterator[TensorSlice]:
    """Yield whole tensors of all parts on rank 0; as `zeroshard.full.parts.collect` does it."""
    named = (Named(piece.name, piece.data.view(piece.shape)) for piece in own)
    for name, values in collect_named(axes, named):
        yield TensorSlice(name, tuple(values.shape), 0, values.reshape(-1))
