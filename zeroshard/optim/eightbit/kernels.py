"""Steps of a range of blocks in one pass over memory, compiled by numba.

A block of 256 is taken through dequantization, update and quantization in the first-level cache. The updates
are those of rules.py, operation by operation: without fastmath the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.optim.eightbit.blocks import Quantized
from zeroshard.optim.eightbit.rules import Rule, Scalars
from zeroshard.optim.eightbit.simd import dequantize_block, largest_of_block, quantize_block
from zeroshard.optim.eightbit.threads import over_blocks
from zeroshard.plan.layout import BLOCK

_compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False)
_MOST_STATES = 3


# Arguments: parameter and gradient [256], states [3, 256], the scalars of rules.py; all float32.


@_compiled
def _adam(p: Any, g: Any, states: Any, c: Any) -> None:
    m, v = states[0], states[1]
    for i in range(BLOCK):
        m[i] = m[i] * c[0] + g[i] * c[1]
        v[i] = v[i] * c[2] + (g[i] * g[i]) * c[3]
    for i in range(BLOCK):
        p[i] = p[i] * c[4] - (m[i] / (np.sqrt(v[i]) * c[5] + c[6])) * c[7]


@_compiled
def _lion(p: Any, g: Any, states: Any, c: Any) -> None:
    m = states[0]
    for i in range(BLOCK):
        p[i] = p[i] * c[4] - np.sign(m[i] * c[0] + g[i] * c[1]) * c[5]
        m[i] = m[i] * c[2] + g[i] * c[3]


@_compiled
def _momentum(p: Any, g: Any, states: Any, c: Any) -> None:
    m = states[0]
    for i in range(BLOCK):
        m[i] = m[i] * c[0] + (p[i] * c[1] + g[i])
        p[i] = p[i] - m[i] * c[2]


@_compiled
def _ademamix(p: Any, g: Any, states: Any, c: Any) -> None:
    m, slow, v = states[0], states[1], states[2]
    for i in range(BLOCK):
        m[i] = m[i] * c[0] + g[i] * c[3]
        slow[i] = slow[i] * c[2] + g[i] * c[5]
        v[i] = v[i] * c[1] + (g[i] * g[i]) * c[4]
    for i in range(BLOCK):
        p[i] = p[i] * c[6] - ((m[i] * c[7] + slow[i] * c[10]) / (np.sqrt(v[i]) * c[8] + c[9])) * c[11]


@_compiled
def _lamb(p: Any, g: Any, states: Any, c: Any) -> None:
    m, v = states[0], states[1]
    for i in range(BLOCK):
        m[i] = m[i] * c[0] + g[i] * c[1]
        v[i] = v[i] * c[2] + (g[i] * g[i]) * c[3]
    for i in range(BLOCK):
        g[i] = (m[i] * c[4]) / (np.sqrt(v[i]) * c[5] + c[6]) + p[i] * c[7]


@_compiled
def _lars(p: Any, g: Any, states: Any, c: Any) -> None:
    m = states[0]
    for i in range(BLOCK):
        m[i] = m[i] * c[0] + (p[i] * c[1] + g[i]) * c[2]
        p[i] = p[i] - m[i]


@_compiled
def _rmsprop(p: Any, g: Any, states: Any, c: Any) -> None:
    s = states[0]
    for i in range(BLOCK):
        decayed = p[i] * c[2] + g[i]
        s[i] = s[i] * c[0] + (decayed * decayed) * c[1]
    for i in range(BLOCK):
        p[i] = p[i] - ((p[i] * c[2] + g[i]) / (np.sqrt(s[i]) + c[3])) * c[4]


@_compiled
def _adagrad(p: Any, g: Any, states: Any, c: Any) -> None:
    s = states[0]
    for i in range(BLOCK):
        decayed = p[i] * c[0] + g[i]
        s[i] = s[i] + decayed * decayed
    for i in range(BLOCK):
        p[i] = p[i] - ((p[i] * c[0] + g[i]) / (np.sqrt(s[i]) + c[1])) * c[2]


_UPDATES = {
    "adam": _adam,
    "lion": _lion,
    "momentum": _momentum,
    "ademamix": _ademamix,
    "lamb": _lamb,
    "lars": _lars,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
}


# Of each state: codes, absmax, and of its codebook values, table and num_lower, each in a tuple by itself.


@_compiled
def _step_block(update: Any, p: Any, g: Any, c: Any, states: Any, quantized: Any, block: int) -> None:
    codes, absmax, values, tables, num_lower = quantized
    start, end = block * BLOCK, (block + 1) * BLOCK
    for at in range(len(codes)):
        dequantize_block(states[at], codes[at][start:end], values[at], absmax[at][block])
    update(p[start:end], g[start:end], states, c)
    for at in range(len(codes)):
        largest = largest_of_block(states[at])
        inverse = np.float32(1) / largest
        if np.isinf(inverse):
            inverse = np.float32(0)
        quantize_block(codes[at][start:end], states[at], tables[at], inverse, num_lower[at])
        absmax[at][block] = largest


@_compiled
def _step_blocks(update: Any, p: Any, g: Any, c: Any, quantized: Any, first: int, last: int) -> None:
    """Whole blocks from first to before last."""
    states = np.empty((_MOST_STATES, BLOCK), np.float32)
    for block in range(first, last):
        _step_block(update, p, g, c, states, quantized, block)


def step(rule: Rule, p: Tensor, g: Tensor, states: Sequence[Quantized], scalars: Scalars) -> None:
    """One step of a slice that starts on a block.

    Args:
        rule: what is done.
        p: [n], float32, contiguous.
        g: the same; LAMB changes it.
        states: of [n].
        scalars: what the rule makes of the numbers of this step.
    """
    update, numbers = _UPDATES[rule.name], np.array(scalars, np.float32)
    whole = p.numel() // BLOCK
    if whole:
        arrays, quantized = (p.numpy(), g.numpy()), _arrays(states)
        over_blocks(lambda first, last: _step_blocks(update, *arrays, numbers, quantized, first, last), whole)
    if p.numel() % BLOCK:
        rest = slice(whole * BLOCK, None)
        _step_cut_block(update, p[rest], g[rest], numbers, [state.part(whole, whole + 1) for state in states])
    increment_version(p)  # of which numpy knows nothing, and replicated parameters follow changes


def _step_cut_block(update: Any, p: Tensor, g: Tensor, numbers: Any, states: Sequence[Quantized]) -> None:
    """The last block of a parameter, filled up with zeros."""
    whole_p, whole_g = _filled(p, 0), _filled(g, 0)
    whole = [Quantized(_filled(s.codes, s.book.zero), s.absmax, s.book) for s in states]
    _step_blocks(update, whole_p.numpy(), whole_g.numpy(), numbers, _arrays(whole), 0, 1)
    p.copy_(whole_p[: p.numel()])
    g.copy_(whole_g[: g.numel()])
    for state, filled in zip(states, whole, strict=True):
        state.codes.copy_(filled.codes[: p.numel()])


def _filled(part: Tensor, value: int) -> Tensor:
    filled = part.new_full((BLOCK,), value)
    filled[: part.numel()] = part
    return filled


def _arrays(states: Sequence[Quantized]) -> tuple[tuple[Any, ...], ...]:
    return (
        tuple(state.codes.numpy() for state in states),
        tuple(state.absmax.numpy() for state in states),
        tuple(state.book.values.numpy() for state in states),
        tuple(state.book.table.numpy() for state in states),
        tuple(np.int32(state.book.num_lower) for state in states),
    )
