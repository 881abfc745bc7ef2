"""The tensors of all parts of a model that pipeline ranks hold, one after another on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.comm.mesh import Axes
from zeroshard.comm.messages import LAST_TAGS, Messages


def collect(axes: Axes, own: Iterator[TensorSlice]) -> Iterator[TensorSlice]:
    """Yield the tensors of all parts on rank 0, part by part, and nothing on other ranks; collective.

    Rank 0 holds one tensor of another part at a time.

    Args:
        axes: the axes.
        own: the tensors of this rank's part, whole, on the first rank of the part; nothing on its others.
    """
    if axes.pp.rank == 0:
        yield from own
    messages = Messages(axes.pp, LAST_TAGS)
    for part in range(1, axes.pp.size):
        label = f"tensors of pipeline rank {part}"
        if axes.pp.rank == part:
            for piece in own:
                name = torch.frombuffer(bytearray(piece.name.encode()), dtype=torch.uint8)
                tensors = [name.to(messages.device), piece.data.view(piece.shape).to(messages.device)]
                messages.send(tensors, 0, label, with_forms=True)
            if axes.everyone.rank == 0:
                messages.send([], 0, label, with_forms=True)
            messages.finish()
        elif axes.world.rank == 0:
            while tensors := messages.expect(part, label, None).wait():
                name, data = tensors
                yield TensorSlice(bytes(name.tolist()).decode(), tuple(data.shape), 0, data.view(-1))
