"""Block-wise states: codes of a byte each under a name, a scale for each block under `<name>_absmax`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from zeroshard.optim.eightbit.blocks import num_blocks
from zeroshard.optim.eightbit.states import ABSMAX
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


def shape_of(key: str, dtypes: Dtypes, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a state.

    Args:
        shape: of the parameter, or of a slice of it that starts on a block.
    """
    return (num_blocks(math.prod(shape)),) if is_scales(key, dtypes) else tuple(shape)


def blocks_of(span: Span) -> Span:
    """The blocks of a range of elements that starts on one."""
    return Span(span.start // BLOCK, num_blocks(span.stop))
