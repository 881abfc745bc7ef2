"""A parameter of which ranks hold slices: its full values are gathered, and cut into slices again."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm import moves
from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.wholes import own_value, whole_value

_GATHERED_BYTES = 64 << 20
"""Memory that a gather takes beside its result."""


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter, and the places of its slices."""

    runtime: Runtime
    buffer: FlatBuffer
    index: int

    @property
    def sharded(self) -> ShardedParameter:
        return self.buffer.sharded[self.index]

    @property
    def gradient(self) -> Tensor | None:
        """This rank's slice of the gradient."""
        with past_guards():
            return self.sharded.grad

    def set_gradient(self, values: Tensor) -> None:
        """Give this rank's slice of the gradient, [n], other values."""
        with past_guards():
            self.sharded.grad = values

    def gather(self, own: Tensor) -> Tensor:
        """Gather a whole tensor, in the parameter's shape, from the slices [n] of the ranks; collective.

        The result lies on the device that computes, wherever the slices do.
        """
        axes, original = self.runtime.context.axes, self.buffer.originals[self.index]
        return whole_value(self._gather_part(own), original, axes.tp)

    def _gather_part(self, own: Tensor) -> Tensor:
        """Gather this rank's part, or all, of a parameter from the ranks that share it."""
        shape = self.buffer.shapes[self.index]
        keeps_dtype = self.buffer.plan.is_packed or not own.dtype.is_floating_point
        wide = own.dtype if keeps_dtype else torch.promote_types(own.dtype, torch.float32)
        device = self.runtime.context.device
        if not self.buffer.is_partial:
            return moves.to_device(own.detach().to(wide, copy=True), device).view(shape)
        axis = self.runtime.context.axis
        spans = [self.buffer.layout.owned(self.index, rank) for rank in range(axis.size)]
        whole = torch.empty(shape.numel(), dtype=wide, device=device)
        longest = max(span.size for span in spans)
        step = min(longest, max(1, _GATHERED_BYTES // (axis.size * own.element_size())))
        for at in range(0, longest, step or 1):
            piece = torch.zeros(step, dtype=own.dtype, device=device)
            part = own.detach()[at : at + step]
            piece[: part.numel()].copy_(part)
            pieces = torch.empty(axis.size * step, dtype=own.dtype, device=device)
            label = f"all-gather of '{self.sharded.fqn}'"
            axis.all_gather(
                pieces.view(torch.uint8), piece.view(torch.uint8), tag=self.buffer.tag, label=label
            ).wait()
            for span, values in zip(spans, pieces.split(step), strict=True):
                start = min(span.start + at, span.stop)
                num = min(step, span.stop - start)
                whole[start : start + num].copy_(values[:num])
        return whole.view(shape)

    def cut(self, values: Tensor) -> Tensor:
        """This rank's slice of a full tensor, [n], on its device."""
        start, original = self.buffer.start(self.index), self.buffer.originals[self.index]
        values = own_value(values.detach(), original, self.runtime.context.axes.tp)
        part = values.reshape(-1)[start : start + self.sharded.numel()]
        return moves.beside(part, self.buffer.main)

    def digest(self, values: Any) -> bytes:
        """A digest of a full tensor, which ranks compare.

        Raises:
            ValueError: it is not a tensor, or has another shape.
        """
        shape = tuple(self.buffer.whole_shapes[self.index])
        if not isinstance(values, Tensor) or tuple(values.shape) != shape or values.is_meta:
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"'{self.sharded.fqn}': expected a full tensor of shape {shape}, got {got}")
        raw = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return blake2b(f"{values.dtype}".encode() + raw.numpy().tobytes(), digest_size=16).digest()
