"""Stochastic rounding to bfloat16 in one pass over a GPU's memory; compiled by Triton.

`bfloat16.py` gives the same bits, also for nan.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

_SIZE = 1 << 11
"""Elements of a program."""


@triton.jit
def rounded(x: tl.tensor, at: tl.tensor, key: tl.tensor, start: tl.tensor) -> tl.tensor:
    """Return one of the two bfloat16 around each value.

    Args:
        x: float32, any shape.
        at: int64, of this shape: the places of the values in the slice.
        key: uint64, the key of the parameter in this step.
        start: int64, the place of the slice in the whole parameter.
    """
    place = start + at
    z = key + ((place >> 2).to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    bits = (z >> ((place & 3) * 16).to(tl.uint64)).to(tl.uint32) & 0xFFFF
    word = x.to(tl.uint32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    word = tl.where(magnitude < 0x7F800000, word + bits, word)
    word = tl.where(magnitude > 0x7F800000, 0xFFFF0000, word)  # the nan that a CPU writes
    return (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


# Numbers have the types that are written here: another value compiles nothing anew.


@triton.jit(do_not_specialize=["count", "key", "start"])
def round_slice(
    out: tl.tensor, values: tl.tensor, count: tl.int64, key: tl.uint64, start: tl.int64, size: tl.constexpr
) -> None:
    """Round [count] values; each program takes `size` of them."""
    first = tl.program_id(0).to(tl.int64) * size
    at = first + tl.arange(0, size)
    if first + size <= count:  # without a mask memory goes in vectors
        tl.store(out + at, rounded(tl.load(values + at), at, key, start))
    else:
        here = at < count
        tl.store(out + at, rounded(tl.load(values + at, here, 0.0), at, key, start), here)


def round_into(out: Tensor, values: Tensor, key: int, start: int) -> None:
    """Round like `rounding.round_into`; both tensors are contiguous, on a GPU."""
    if count := values.numel():
        with torch.cuda.device_of(values):
            round_slice[(triton.cdiv(count, _SIZE),)](out, values, count, key, start, _SIZE)
        increment_version(out)  # autograd does not see the change
