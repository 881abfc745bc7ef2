"""States of an optimizer, a byte an element with a scale for each block of 256, or in float32."""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from zeroshard.optim.eightbit.codebook import Codebook
from zeroshard.plan.layout import BLOCK, round_up


class StateValues(Protocol):
    """One state of a slice that starts on a block."""

    def part(self, first: int, last: int) -> Self:
        """The state of a range of blocks."""

    def load(self) -> Tensor:
        """[n], float32."""

    def store(self, values: Tensor) -> None:
        """Replace the values by these, [n], float32."""


class Exact(NamedTuple):
    """Values as they are."""

    values: Tensor
    """[n], float32."""

    def part(self, first: int, last: int) -> Exact:
        """The state of a range of blocks."""
        return Exact(self.values[first * BLOCK : last * BLOCK])

    def load(self) -> Tensor:
        """Return the memory of the values itself, [n], float32."""
        return self.values

    def store(self, values: Tensor) -> None:
        """Copy the values, [n], float32."""
        self.values.copy_(values)


class QuantizedState(NamedTuple):
    """Values of one byte."""

    codes: Tensor
    """[n], uint8."""
    absmax: Tensor
    """[ceil(n / 256)], float32: the largest magnitude of each block."""
    book: Codebook
    """The values of the codes."""

    @staticmethod
    def zeros(num: int, book: Codebook) -> QuantizedState:
        """`num` zeros."""
        codes = torch.full((num,), book.zero, dtype=torch.uint8, device=book.values.device)
        return QuantizedState(codes, torch.zeros(num_blocks(num), device=book.values.device), book)

    def part(self, first: int, last: int) -> QuantizedState:
        """The state of a range of blocks."""
        return QuantizedState(self.codes[first * BLOCK : last * BLOCK], self.absmax[first:last], self.book)

    def load(self) -> Tensor:
        """[n], float32, in memory of their own."""
        values = self.book.values.index_select(0, self.codes.int())
        _by_blocks(values).mul_(self.absmax[: values.numel() // BLOCK, None])
        if rest := values.numel() % BLOCK:
            values[-rest:].mul_(self.absmax[-1])
        return values

    def store(self, values: Tensor) -> None:
        """Store the nearest codes of values, [n], float32, each block scaled by 1 / absmax; ties go down.

        A block whose largest magnitude is so small that its inverse is infinite becomes zeros.
        """
        missing = round_up(values.numel(), BLOCK) - values.numel()
        rows = _by_blocks(torch.nn.functional.pad(values, (0, missing)) if missing else values)
        torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=self.absmax).abs_()  # no zeros with a sign
        inverse = self.absmax.reciprocal()
        inverse.masked_fill_(inverse.isinf(), 0.0)
        codes = self.book.nearest((rows * inverse[:, None]).view(-1))
        self.codes.copy_(codes[: values.numel()])


def num_blocks(num: int) -> int:
    """The number of blocks of `num` elements; the last block may be cut short."""
    return -(-num // BLOCK)


def _by_blocks(values: Tensor) -> Tensor:
    """[whole blocks, 256], a view."""
    return values[: values.numel() // BLOCK * BLOCK].view(-1, BLOCK)
