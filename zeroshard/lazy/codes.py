"""Codes of a weight that is quantized when it is read: each rank quantizes its own part.

bitsandbytes quantizes a weight block by block, and a block has one scale. A block has some elements of the
flattened weight with 4 bits, and a row with 8 bits. So the codes of a range follow from the blocks that it
touches, and are the same bits as those of the whole weight:

    weight    |--block--|--block--|--block--|--block--|
    range            |-----------|                         reads two blocks, and keeps their scales
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroshard.lazy.deferred import describe_origin, is_stored, read_part
from zeroshard.plan.layout import Span


@dataclass(eq=False)
class Codes:
    """The codes of a weight, flattened, as a source of values."""

    weight: Tensor
    """The weight that is quantized: a tensor with memory, or with deferred values."""
    block_size: int
    """The elements of the weight that have one scale."""
    per_code: int
    """The elements of the weight in one element of the codes."""
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    """[n] elements, from the start of a block -> (codes [n / per_code], scales [blocks])."""
    _scales: Tensor | None = field(default=None, init=False)

    @property
    def scales(self) -> Tensor:
        """[blocks], float32, on the CPU: those of the blocks that were read; 0 for others."""
        if self._scales is None:  # not while the model is built: it would get no memory
            self._scales = torch.zeros(-(-self.weight.numel() // self.block_size), device="cpu")
        return self._scales

    @property
    def numel(self) -> int:
        """The number of codes."""
        return -(-self.weight.numel() // self.per_code)

    @property
    def is_stored(self) -> bool:
        """True if the weight lies in a file, so that all ranks read the same values."""
        return is_stored(self.weight)

    def blocks_of(self, span: Span) -> Span:
        """Return the blocks that a range of codes touches."""
        stop = min(span.stop * self.per_code, self.weight.numel())
        return Span(span.start * self.per_code // self.block_size, -(-stop // self.block_size))

    def read(self, *spans: Span) -> Tensor:
        """Return ranges of the codes, one after the other: [elements], on the CPU."""
        return torch.cat([self._read(span) for span in spans])

    def _read(self, span: Span) -> Tensor:
        blocks, size = self.blocks_of(span), self.weight.numel()
        elements = Span(blocks.start * self.block_size, min(blocks.stop * self.block_size, size))
        codes, self.scales[blocks.slice] = self.quantize(read_part(self.weight, elements))
        first = elements.start // self.per_code
        return codes.reshape(-1)[span.start - first : span.stop - first]

    def __str__(self) -> str:
        """Describe it in the same words on all ranks."""
        return f"quantized in blocks of {self.block_size}: {describe_origin(self.weight)}"
