"""Blocks of bfloat16, widened and stochastically rounded in a CPU's caches; compiled by numba.

numba has no bfloat16: these functions see bfloat16 as uint16 and float32 as uint32, over the same memory.
The torch operations in `stepping/rounding.py` give the same bits.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from zeroshard.plan.layout import BLOCK

compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False)

NUM_WORDS = BLOCK // 4 + 1
"""Words with the random bits of a block; one more, since a block may start in the middle of a word."""

_GAMMA, _MIX_1, _MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_NAN = np.uint16(0xFFFF)
"""The nan that torch's conversion on a CPU gives."""


@compiled
def widen_block(out: Any, narrow: Any) -> None:
    """Convert [n], bfloat16, to [n], float32."""
    for i in range(out.size):
        out[i] = np.uint32(narrow[i]) << np.uint32(16)


@compiled
def round_block(out: Any, values: Any, words: Any, key: Any, start: int) -> None:
    """Round each value to one of the two bfloat16 around it.

    Args:
        out: [n], bfloat16; n is at most 256.
        values: [n], float32.
        words: [NUM_WORDS], uint64: scratch memory.
        key: uint64, the key of the parameter in this step.
        start: the place of the first value in the whole parameter.
    """
    counted = key + np.uint64(start // 4) * _GAMMA
    for i in range(NUM_WORDS):
        z = counted + np.uint64(i + 1) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        words[i] = z ^ (z >> np.uint64(31))
    bits = words.view(np.uint16)[start % 4 :]  # the lowest first, as all CPUs that torch knows store them
    for i in range(out.size):
        magnitude = values[i] & _MAGNITUDE
        carried = np.uint32(values[i] + np.uint32(bits[i])) if magnitude < _INFINITY else values[i]
        out[i] = _NAN if magnitude > _INFINITY else np.uint16(carried >> np.uint32(16))
