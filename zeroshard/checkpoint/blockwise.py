"""Block-wise states: codes of a byte each under a name, a scale for each block under `<name>_absmax`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zeroshard.optim.eightbit.blocks import num_blocks
from zeroshard.optim.eightbit.states import ABSMAX
from zeroshard.plan.cuts import Cut
from zeroshard.plan.layout import BLOCK, Span

Dtypes = Mapping[str, torch.dtype]
"""The dtypes of all states of a parameter, by key. They tell which states belong together."""


def is_codes(key: str, dtypes: Dtypes) -> bool:
    """Return True for a quantized state."""
    return dtypes.get(key) == torch.uint8 and key + ABSMAX in dtypes


def is_scales(key: str, dtypes: Dtypes) -> bool:
    """Return True for a state that holds the scales of another one."""
    return key.endswith(ABSMAX) and is_codes(key.removesuffix(ABSMAX), dtypes)


def find_unpaired(dtypes: Dtypes) -> str | None:
    """The first half of a quantized state, in words; None where all are whole."""
    for key, dtype in dtypes.items():
        if key.endswith(ABSMAX) and not is_scales(key, dtypes):
            return f"scales '{key}' without codes of one byte"
        if dtype == torch.uint8 and not is_codes(key, dtypes):
            return f"codes '{key}' without scales"
    return None


def shape_of(key: str, dtypes: Dtypes, shape: Sequence[int], blocks: Cut | None = None) -> tuple[int, ...]:
    """The shape of a state.

    Args:
        shape: of the parameter, or of a slice of it that starts on a block.
        blocks: the cut of the parameter, if each part of it has blocks of its own.
    """
    return (num_scales(shape, blocks),) if is_scales(key, dtypes) else tuple(shape)


def num_scales(shape: Sequence[int], cut: Cut | None = None) -> int:
    """The number of blocks of a parameter, each of whose parts begins with a block."""
    if cut is None:
        return num_blocks(math.prod(shape))
    return cut.num_ranks * num_blocks(math.prod(cut.local_shape))


def own_blocks(cut: Cut | None) -> Cut | None:
    """Return a cut if its parts have other blocks than the whole parameter; None if they are the same."""
    if cut is None or cut.num_ranks == 1:
        return None
    is_flat = len(cut.spans(0)) == 1 and math.prod(cut.shape[: cut.dim]) == 1
    return None if is_flat and not math.prod(cut.local_shape) % BLOCK else cut


def have_same_blocks(one: Cut | None, other: Cut | None) -> bool:
    """Return True if the blocks of two cuts of a parameter, as `own_blocks` gives them, are the same."""
    if one is None or other is None:
        return one is other
    return (one.dim, one.num_ranks, one.spans(0)) == (other.dim, other.num_ranks, other.spans(0))


def block_numbers(
    shape: Sequence[int], span: Span, held: Cut | None, rank: int, blocks: Cut | None
) -> Tensor:
    """Return the blocks that elements lie in: [span.size], int64.

    Args:
        shape: the shape of the parameter.
        span: a flat range of the part of a rank, or of the whole parameter.
        held: the cut of that part; None for the whole.
        rank: the rank of that part.
        blocks: the cut whose parts have the blocks; None for those of the whole.
    """
    local = shape if held is None else held.local_shape
    at = list(torch.unravel_index(torch.arange(span.start, span.stop), tuple(local)))
    if held is not None:
        places = torch.cat([torch.arange(own.start, own.stop) for own in held.spans(rank)])
        at[held.dim] = places[at[held.dim]]
    if blocks is None:
        return _ravel(at, shape) // BLOCK
    owners = torch.empty(shape[blocks.dim], dtype=torch.int64)
    inside = torch.empty_like(owners)
    for number in range(blocks.num_ranks):
        places = torch.cat([torch.arange(own.start, own.stop) for own in blocks.spans(number)])
        owners[places], inside[places] = number, torch.arange(places.numel())
    owner, at[blocks.dim] = owners[at[blocks.dim]], inside[at[blocks.dim]]
    return owner * num_blocks(math.prod(blocks.local_shape)) + _ravel(at, blocks.local_shape) // BLOCK


def _ravel(at: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    flat = torch.zeros_like(at[0])
    for index, size in zip(at, shape, strict=True):
        flat = flat * size + index
    return flat


def blocks_of(span: Span) -> Span:
    """The blocks of a range of elements that starts on one."""
    return Span(span.start // BLOCK, num_blocks(span.stop))
