"""Exchanges of activations over one axis: a tensor in, a tensor out, when the values are there.

The axis is the axis of tensor parallelism, whose ranks compute parts of the same layer. All ranks of the axis
make the same calls in the same order, with the same shapes and dtypes. The results are the same bits on all
ranks, or parts of one tensor that is. Sums are taken at least in float32 and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from zeroshard.comm.collectives import Axis, Pending
from zeroshard.comm.counter import ALL_REDUCE
from zeroshard.comm.pool import BufferPool

_Value = TypeVar("_Value")


class Copied(NamedTuple):
    """An input of divided layers."""

    of: Tensor
    version: int
    """Its version counter then."""
    copy: Tensor
    """The same values; its gradient is added up over the ranks."""


class Activations:
    """Sums, gathers and splits tensors over the ranks of an axis.

    Args:
        axis: the axis.
        tag: a tag of this engine that no other exchange uses. One exchange of activations follows another, so
            one tag serves them all.
    """

    def __init__(self, axis: Axis, tag: int) -> None:
        self.rank, self.size, self.device = axis.rank, axis.size, axis.device
        self._axis, self._tag = axis, tag
        self.last: Copied | None = None
        """The input that a divided layer was given last; None after the pair of layers."""
        self._pool = BufferPool(axis.device)

    def sum(self, value: Tensor, label: str) -> Tensor:
        """Return the sum of a tensor over the ranks, of the same shape and dtype."""
        if not value.numel():
            return value
        if not self._axis.exchanges:
            total = value.contiguous().clone()
            self._axis.all_reduce(total, label)
            return total
        if self.size == 2:
            return self._sum_of_two(value.contiguous(), label)
        num = value.numel()
        flat = value.new_empty(-(-num // self.size) * self.size)
        flat[:num].copy_(value.reshape(-1))
        flat[num:].zero_()
        own = flat.chunk(self.size)[self.rank]
        own.copy_(self._scattered(flat, label))
        self._axis.all_gather(flat, own, tag=self._tag, label=label).wait()
        return flat[:num].view(value.shape)

    def _sum_of_two(self, own: Tensor, label: str) -> Tensor:
        """Return the sum over two ranks: each sends all it has, which is no more than two halves are.

        One exchange in place of two that follow each other. The bits are the same on both ranks: a + b is
        b + a.
        """
        axis, peer = self._axis, 1 - self.rank
        label = axis.note(ALL_REDUCE, own.nbytes, label)
        other = self._pool.take(own.dtype, own.numel())
        works = axis.exchange({peer: own.view(-1)}, {peer: other}, self._tag, label)
        Pending(axis, label, ALL_REDUCE, works).wait()
        total = own + other.view(own.shape)
        self._pool.give(other)
        return total

    def gather(self, value: Tensor, dim: int, label: str) -> Tensor:
        """Return the tensors of all ranks, in rank order, as one along `dim`."""
        own = value.contiguous()
        flat = value.new_empty(self.size * own.numel())
        self._axis.all_gather(flat, own.view(-1), tag=self._tag, label=label).wait()
        parts = flat.view(self.size, *own.shape)
        return parts.flatten(0, 1) if dim == 0 and own.dim() else torch.cat(parts.unbind(), dim)

    def split(self, value: Tensor, dim: int) -> Tensor:
        """Return this rank's part along `dim`, a copy. Raises ValueError for a size that does not divide."""
        if value.shape[dim] % self.size:
            raise ValueError(
                f"expected a multiple of the {self.size} tensor-parallel ranks in dimension {dim}, "
                f"got {value.shape[dim]} of shape {list(value.shape)}"
            )
        return value.chunk(self.size, dim)[self.rank].contiguous()

    def scatter(self, value: Tensor, dim: int, label: str) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks.

        Raises:
            ValueError: the size does not divide.
        """
        own = self.split(value, dim)
        flat = torch.stack(value.chunk(self.size, dim)).view(-1)
        return self._scattered(flat, label).view(own.shape)

    def first(self, value: _Value, label: str) -> _Value:
        """Return the small picklable value of the first rank. The hosts wait for it, devices do not."""
        everyone: list[_Value] = self._axis.all_gather_object(value, label)
        return everyone[0]

    def _scattered(self, flat: Tensor, label: str) -> Tensor:
        """Return this rank's part of the sum of `flat`, [size * K], which is used up: [K]."""
        wide = torch.promote_types(flat.dtype, torch.float32)
        own = flat.new_empty(flat.numel() // self.size, dtype=wide)
        self._axis.reduce_scatter(flat, own, self._pool, tag=self._tag, label=label).wait()
        return own.to(flat.dtype)
