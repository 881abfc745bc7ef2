"""Tensors of a model of which pipeline ranks hold parts: on rank 0, or on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.comm.mesh import Axes
from zeroshard.comm.messages import LAST_TAGS, Messages


class Named(NamedTuple):
    """A whole tensor and its name."""

    name: str
    values: Tensor


def collect(axes: Axes, own: Iterator[Named]) -> Iterator[Named]:
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
                tensors = [name.to(messages.device), piece.values.to(messages.device)]
                messages.send(tensors, 0, label, with_forms=True)
                del piece, tensors  # before the next one is gathered
            if axes.everyone.rank == 0:
                messages.send([], 0, label, with_forms=True)
            messages.finish()
        elif axes.world.rank == 0:
            while (received := _receive(messages, part, label)) is not None:
                yield received
                del received  # before the next one arrives


def _receive(messages: Messages, source: int, label: str) -> Named | None:
    """Return the next tensor of a part; None after the last one."""
    tensors = messages.expect(source, label, None).wait()
    if not tensors:
        return None
    name, values = tensors
    return Named(bytes(name.tolist()).decode(), values)


def spread(axes: Axes, part: int, own: Any) -> Any:
    """Return on all ranks a value of the ranks of one part; collective.

    Args:
        axes: the axes.
        part: the pipeline rank of the part.
        own: on its ranks the value, the same on all: a tensor, a dict with tensors among its values, or
            another value that can be pickled. It counts nowhere else.
    """
    if axes.pp.size == 1:
        return own
    label, messages = f"values of pipeline rank {part}", Messages(axes.pp, LAST_TAGS)
    if axes.pp.rank == part:
        items = own if isinstance(own, dict) else {None: own}
        apart = {key: value for key, value in items.items() if _is_on(value, messages.device)}
        plain = {key: None if key in apart else value for key, value in items.items()}
        axes.pp.all_gather_object((plain, list(apart), isinstance(own, dict)), label)
        for target in range(axes.pp.size) if apart else ():
            if target != part:
                messages.send(list(apart.values()), target, label, with_forms=True)
        messages.finish()
        return own
    values, keys, is_dict = axes.pp.all_gather_object(None, label)[part]
    if keys:
        values |= dict(zip(keys, messages.expect(part, label, None).wait(), strict=True))
    return values if is_dict else values[None]


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device == device
