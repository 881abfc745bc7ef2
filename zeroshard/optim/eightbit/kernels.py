"""Steps of a range of blocks in one pass over memory, compiled by numba.

A block of 256 is taken through dequantization, update and quantization in the first-level cache. The update
is the rule's own function, compiled for single numbers: without fastmath it gives the bits that it gives for
tensors.

numba has no bfloat16: functions see it as uint16 and float32 as uint32, over the same memory. The torch
operations in `stepping/rounding.py` give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import overload
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.optim.eightbit.blocks import QuantizedState
from zeroshard.optim.eightbit.rule import Rule, Scalars, quotient, root, sign
from zeroshard.optim.eightbit.step import over_threads
from zeroshard.plan.layout import BLOCK
from zeroshard.stepping.rounding import Bits

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


@compiled
def dequantize_block(out: Any, codes: Any, values: Any, scale: Any) -> None:
    """out[i] = values[codes[i]] * scale."""
    for i in range(out.size):
        out[i] = values[codes[i]] * scale


@compiled
def largest_of_block(x: Any) -> Any:
    """The bits of max |x[i]|; of NaN where there is one."""
    bits, largest = x.view(np.int32), np.int32(0)
    for i in range(bits.size):  # magnitudes of floats compare as integers, NaN above infinity
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest


@compiled
def quantize_block(codes: Any, x: Any, table: Any, inverse: Any, num_lower: Any) -> None:
    """codes[i] = the nearest one to x[i] * inverse, by the table of a codebook; blocks.py shows how."""
    for i in range(x.size):
        x[i] *= inverse
    bits, mask = x.view(np.int32), (np.int32(1) << num_lower) - np.int32(1)
    for i in range(x.size):
        entry = table[np.uint32(bits[i]) >> np.uint32(num_lower)]
        lower = (bits[i] ^ (bits[i] >> np.int32(31))) & mask
        codes[i] = np.uint32(entry + lower) >> np.uint32(num_lower)


# Their forms for numbers, in the same roundings.
overload(quotient)(lambda a, b: lambda a, b: a / b)
overload(root)(lambda x: lambda x: np.sqrt(x))
overload(sign)(lambda x: lambda x: np.sign(x))

# One loop for each number of states: numba makes no tuple whose length it does not know.


def _loop_1(update: Any) -> Any:
    def loop(changed: Any, other: Any, states: Any, scalars: Any) -> None:
        one = states[0]
        for i in range(changed.size):
            changed[i], (one[i],) = update(changed[i], other[i], (one[i],), scalars)

    return loop


def _loop_2(update: Any) -> Any:
    def loop(changed: Any, other: Any, states: Any, scalars: Any) -> None:
        one, two = states[0], states[1]
        for i in range(changed.size):
            changed[i], (one[i], two[i]) = update(changed[i], other[i], (one[i], two[i]), scalars)

    return loop


def _loop_3(update: Any) -> Any:
    def loop(changed: Any, other: Any, states: Any, scalars: Any) -> None:
        one, two, three = states[0], states[1], states[2]
        for i in range(changed.size):
            new = update(changed[i], other[i], (one[i], two[i], three[i]), scalars)
            changed[i], (one[i], two[i], three[i]) = new

    return loop


@cache
def _compile(rule: Rule) -> Any:
    """The update of a block, (changed, other, states, scalars), both of parameter and gradient, [256]."""
    update = given = compiled(rule.update)
    if rule.gives_update:
        update = compiled(lambda g, p, states, scalars: given(p, g, states, scalars))
    return compiled((_loop_1, _loop_2, _loop_3)[len(rule.states) - 1](update))


# Quantized states are tuples by codes, absmax, and values, table and num_lower of the codebooks.


@compiled
def _step_block(
    update: Any, changed: Any, other: Any, scalars: Any, states: Any, quantized: Any, at: int
) -> None:
    """Step one block of parameter and gradient, both of at most 256, float32."""
    codes, absmax, values, tables, num_lower = quantized
    start, end, size = at * BLOCK, at * BLOCK + changed.size, changed.size
    for state in range(len(codes)):
        dequantize_block(states[state][:size], codes[state][start:end], values[state], absmax[state][at])
    update(changed, other, states, scalars)
    for state in range(len(codes)):
        new = states[state][:size]
        absmax[state][at : at + 1].view(np.int32)[0] = largest_of_block(new)
        inverse = np.float32(1) / absmax[state][at]
        if np.isinf(inverse):
            inverse = np.float32(0)
        quantize_block(codes[state][start:end], new, tables[state], inverse, num_lower[state])


@compiled
def _step_blocks(
    update: Any, changed: Any, other: Any, scalars: Any, quantized: Any, bits: Any, first: int, last: int
) -> None:
    """Step blocks from first to before last; with bits: of bfloat16, widened and rounded in caches."""
    states, words = np.empty((len(quantized[0]), BLOCK), np.float32), np.empty(NUM_WORDS, np.uint64)
    wide_p, wide_g = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for block in range(first, last):
        start, end = block * BLOCK, min((block + 1) * BLOCK, changed.size)
        if bits is None:  # numba compiles one of the two ways
            _step_block(update, changed[start:end], other[start:end], scalars, states, quantized, block)
        else:
            p, g = wide_p[: end - start], wide_g[: end - start]
            widen_block(p.view(np.uint32), changed[start:end])
            widen_block(g.view(np.uint32), other[start:end])
            _step_block(update, p, g, scalars, states, quantized, block)
            round_block(changed[start:end], p.view(np.uint32), words, bits[0], bits[1] + start)


def step(
    rule: Rule,
    p: Tensor,
    g: Tensor,
    states: Sequence[QuantizedState],
    scalars: Scalars,
    bits: Bits | None = None,
) -> None:
    """One step of a slice that starts on a block.

    Args:
        rule: how it changes.
        p: [n], float32, contiguous; bfloat16 if there are `bits`.
        g: the same; replaced by the update where the rule gives that.
        states: of [n].
        scalars: the rule's numbers of this step.
        bits: the random bits of a bfloat16 parameter; only for a rule that gives no update.
    """
    assert bits is None or not rule.gives_update, "an update is not rounded"
    update, numbers = _compile(rule), tuple(map(np.float32, scalars))
    changed, other = (g, p) if rule.gives_update else (p, g)
    pair = (changed, other) if bits is None else (changed.view(torch.uint16), other.view(torch.uint16))
    key = None if bits is None else (np.uint64(bits.key), bits.start)
    fixed = (update, *(one.numpy() for one in pair), numbers, _arrays(states), key)
    over_threads(lambda first, last: _step_blocks(*fixed, first, last), -(-p.numel() // BLOCK))
    increment_version(changed)  # numpy does not count changes, by which replicated parameters are followed


def _arrays(states: Sequence[QuantizedState]) -> tuple[tuple[Any, ...], ...]:
    rows = [
        (codes.numpy(), absmax.numpy(), book.values.numpy(), book.table.numpy(), np.int32(book.num_lower))
        for codes, absmax, book in states
    ]
    return tuple(zip(*rows, strict=True))
