"""Steps of whole slices in one pass over a GPU's memory, compiled by Triton.

A program takes some blocks of 256 through dequantization, update, quantization and stochastic rounding. The
update is the rule's own function, as in `kernels.py`. Quotients and roots are rounded to nearest, and no
multiplication is fused with an addition: the bits are the same as on the CPU. Only a nan of float32 has
the bits of its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.optim.eightbit.blocks import QuantizedState, StateValues, codebook
from zeroshard.optim.eightbit.rule import Rule, Scalars
from zeroshard.plan.layout import num_blocks
from zeroshard.stepping.bfloat16_gpu import rounded
from zeroshard.stepping.rounding import Bits

_ROWS, _WARPS = 8, 8
"""Blocks of a program, and the groups of 32 threads that share them."""


@triton.jit
def _quotient(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.div_rn(a, b)


@triton.jit
def _root(x: tl.tensor) -> tl.tensor:
    return tl.sqrt_rn(x)


@triton.jit
def _sign(x: tl.tensor) -> tl.tensor:
    return tl.where(x == x, (x > 0).to(tl.float32) - (x < 0).to(tl.float32), x)


@cache
def compiled_update(rule: Rule) -> Any:
    """The update of a rule as a function of Triton, with its own forms of `quotient`, `root` and `sign`."""
    update = rule.update
    seen = {name: update.__globals__[name] for name in update.__code__.co_names if name in update.__globals__}
    kinds = dict.fromkeys(map(str, update.__annotations__.values()), tl.constexpr(None))  # it evaluates them
    own = {"tl": tl, "quotient": _quotient, "root": _root, "sign": _sign, "__name__": update.__module__}
    return triton.jit(FunctionType(update.__code__, kinds | seen | own, update.__name__))


@cache
def constants(rule: Rule) -> tuple[tuple[int, int], ...]:
    """(code of 0, num_lower) of the codebook of each state."""
    books = [codebook(is_signed, torch.device("cpu")) for is_signed in rule.states.values()]
    return tuple((book.zero, book.num_lower) for book in books)


@triton.jit
def _widened(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.bfloat16:  # by its bits: Triton's interpreter converts denormals wrongly
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


# A state is a tuple: (values,), or (codes, absmax, values of the codebook, table of the codebook).


@triton.jit
def _load(
    state: tl.tuple,
    at: tl.tensor,
    here: tl.tensor,
    block: tl.tensor,
    is_block: tl.tensor,
    zero: tl.constexpr,
) -> tl.tensor:
    if len(state) == 1:
        return tl.load(state[0] + at, here, 0.0)
    else:
        codes = tl.load(state[0] + at, here, zero).to(tl.int32)  # the last block is filled up with zeros
        return tl.load(state[2] + codes) * tl.load(state[1] + block, is_block, 0.0)[:, None]


@triton.jit
def _store(
    state: tl.tuple,
    x: tl.tensor,
    at: tl.tensor,
    here: tl.tensor,
    block: tl.tensor,
    is_block: tl.tensor,
    num_lower: tl.constexpr,
) -> None:
    if len(state) == 1:
        tl.store(state[0] + at, x, here)
    else:
        # Magnitudes of floats compare as integers, NaN above infinity.
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), largest)
        inverse = tl.where(inverse == float("inf"), 0.0, inverse)
        scaled = x * inverse[:, None]
        # The codes that a CPU gives NaN: by the sign of NaN, of which a GPU has one.
        of_nan = tl.where(inverse == inverse, -1.0, 1.0)[:, None]
        bits = tl.where(scaled == scaled, scaled, of_nan).to(tl.int32, bitcast=True)
        lower = ((bits >> 31) ^ bits) & ((1 << num_lower) - 1)
        entry = tl.load(state[3] + (bits.to(tl.uint32, bitcast=True) >> num_lower).to(tl.int32))
        code = (entry + lower).to(tl.uint32, bitcast=True) >> num_lower
        tl.store(state[0] + at, code.to(tl.uint8), here)
        tl.store(state[1] + block, largest, is_block)


@triton.jit
def _step_blocks(  # noqa: PLR0913
    p: tl.tensor,
    g: tl.tensor,
    states: tl.tuple,
    scalars: tl.tuple,
    key: tl.tensor,
    start: tl.tensor,
    block: tl.tensor,
    is_block: tl.tensor,
    at: tl.tensor,
    here: tl.tensor,
    update: tl.constexpr,
    constants: tl.constexpr,
    gives_update: tl.constexpr,
) -> None:
    """Step [blocks] and their elements at [blocks, 256], as far as they are there."""
    old = ()
    for i in tl.static_range(len(states)):
        one = _load(states[i], at, here, block, is_block, constants[i][0])
        old = old + (one,)  # type: ignore[assignment]  # noqa: RUF005 (Triton's form)
    x, gradient = _widened(tl.load(p + at, here, 0.0)), _widened(tl.load(g + at, here, 0.0))
    result, new = update(x, gradient, old, scalars)
    for i in tl.static_range(len(states)):
        _store(states[i], new[i], at, here, block, is_block, constants[i][1])
    if p.dtype.element_ty == tl.bfloat16:
        tl.store(p + at, rounded(result, at, key, start), here)
    elif gives_update:
        tl.store(g + at, result, here)
    else:
        tl.store(p + at, result, here)


# Numbers have the types that are written here: another value compiles nothing anew.


@triton.jit(do_not_specialize=["count", "key", "start", "scalars"])
def step_slice(  # noqa: PLR0913 (a kernel has no other place for its numbers)
    p: tl.tensor,
    g: tl.tensor,
    states: tl.tuple,
    scalars: tl.tuple,
    count: tl.int64,
    key: tl.uint64,
    start: tl.int64,
    update: tl.constexpr,
    constants: tl.constexpr,
    gives_update: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    """Step a slice of [count]; each program takes `rows` blocks of it."""
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    if (tl.program_id(0).to(tl.int64) + 1) * (rows * 256) <= count:  # without masks memory goes in vectors
        is_block, here = tl.full((rows,), True, tl.int1), tl.full((rows, 256), True, tl.int1)
        _step_blocks(
            p, g, states, scalars, key, start, block, is_block, at, here, update, constants, gives_update
        )
    else:
        is_block, here = block * 256 < count, at < count
        _step_blocks(
            p, g, states, scalars, key, start, block, is_block, at, here, update, constants, gives_update
        )


def step(
    rule: Rule,
    p: Tensor,
    g: Tensor,
    states: Sequence[StateValues],
    scalars: Scalars,
    bits: Bits | None = None,
) -> None:
    """One step of a slice that starts on a block; arguments as `take_step`, and the rule's scalars."""
    if not p.numel():
        return
    assert bits is None or not rule.gives_update, "an update is not rounded"
    key, start = bits or (0, 0)
    with torch.cuda.device_of(p):
        step_slice[(triton.cdiv(num_blocks(p.numel()), _ROWS),)](
            p,
            g,
            tuple(map(_pointers, states)),
            tuple(map(float, scalars)),
            p.numel(),
            key,
            start,
            compiled_update(rule),
            constants(rule),
            rule.gives_update,
            _ROWS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    increment_version(g if rule.gives_update else p)  # autograd does not see the change


def _pointers(state: StateValues) -> tuple[Tensor, ...]:
    if isinstance(state, QuantizedState):
        return state.codes, state.absmax, state.book.values, state.book.table
    return (state.values,)
