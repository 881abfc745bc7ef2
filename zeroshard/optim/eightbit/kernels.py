"""Steps of a range of blocks in one pass over memory, compiled by numba.

A block of 256 is taken through dequantization, update and quantization in the first-level cache. The update
is the rule's own function, compiled for single numbers: without fastmath it gives the bits that it gives for
tensors.

LLVM does not vectorize table lookups by itself. They are written in LLVM's own terms, in vectors of 16 lanes;
LLVM maps them to what the processor has.

numba has no bfloat16: functions see it as uint16 and float32 as uint32, over the same memory. The torch
operations in `stepping/rounding.py` give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.optim.eightbit.blocks import QuantizedState
from zeroshard.optim.eightbit.rule import Rule, Scalars, quotient, root, sign
from zeroshard.optim.eightbit.step import BlockBatch
from zeroshard.plan.layout import BLOCK
from zeroshard.stepping.rounding import Bits

compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False)

_LANES = 16
_FLOAT, _BYTE, _INT, _LONG, _BIT = ir.FloatType(), *map(ir.IntType, (8, 32, 64, 1))

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


def _lanes(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, _LANES)


def _all(element: ir.Type, value: int) -> ir.Constant:
    """A number in each lane."""
    return ir.Constant(_lanes(element), [value] * _LANES)


class _Emitter:
    """Writes instructions; arrays are contiguous and of one dimension."""

    def __init__(self, context: Any, builder: Any, signature: Any) -> None:
        self._context, self._builder, self._kinds = context, builder, iter(signature.args)

    def start(self, array: Any) -> Any:
        """The address of an array's first element; for each argument in turn."""
        return self._context.make_array(next(self._kinds))(self._context, self._builder, array).data

    def at(self, start: Any, lane: int, element: ir.Type) -> Any:
        """The address of the vector that begins at an element."""
        return self._builder.bitcast(self._builder.gep(start, [_LONG(lane)]), _lanes(element).as_pointer())

    def spread(self, value: Any) -> Any:
        """A value in each lane."""
        nothing = ir.Constant(_lanes(value.type), ir.Undefined)
        first = self._builder.insert_element(nothing, value, _INT(0))
        return self._builder.shuffle_vector(first, nothing, _all(_INT, 0))

    def gather(self, start: Any, indices: Any, element: ir.Type) -> Any:
        """table[index] in each lane, of 4 bytes."""
        builder, pointers = self._builder, _lanes(element.as_pointer())
        offsets = builder.shl(builder.zext(indices, _lanes(_LONG)), _all(_LONG, 2))
        addresses = builder.add(offsets, self.spread(builder.ptrtoint(start, _LONG)))
        name = f"llvm.masked.gather.v{_LANES}{'f32' if element is _FLOAT else 'i32'}.v{_LANES}p0"
        kind = ir.FunctionType(_lanes(element), [pointers, _INT, _lanes(_BIT), _lanes(element)])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        nothing = ir.Constant(_lanes(element), ir.Undefined)
        return builder.call(
            function, [builder.inttoptr(addresses, pointers), _INT(4), _all(_BIT, 1), nothing]
        )


# Arrays may start anywhere that suits one element: hence the alignments, in bytes.


@intrinsic
def dequantize_block(typing: Any, out: Any, codes: Any, values: Any, scale: Any) -> Any:
    """out[i] = values[codes[i]] * scale."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _Emitter(context, builder, signature)
        target, source, table = map(to.start, args[:3])
        factor = to.spread(args[3])
        for lane in range(0, BLOCK, _LANES):
            found = to.gather(table, builder.load(to.at(source, lane, _BYTE), align=1), _FLOAT)
            builder.store(builder.fmul(found, factor), to.at(target, lane, _FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(out, codes, values, scale), emit


@compiled
def largest_of_block(x: Any) -> Any:
    """The bits of max |x[i]|; of NaN where there is one."""
    bits, largest = x.view(np.int32), np.int32(0)
    for i in range(BLOCK):  # magnitudes of floats compare as integers, NaN above infinity
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest


@intrinsic
def quantize_block(typing: Any, codes: Any, x: Any, table: Any, inverse: Any, num_lower: Any) -> Any:
    """codes[i] = the nearest one to x[i] * inverse, by the table of a codebook; blocks.py shows how."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _Emitter(context, builder, signature)
        target, source, table = map(to.start, args[:3])
        factor, num_bits = to.spread(args[3]), to.spread(args[4])
        mask = builder.sub(builder.shl(_all(_INT, 1), num_bits), _all(_INT, 1))
        for lane in range(0, BLOCK, _LANES):
            value = builder.fmul(builder.load(to.at(source, lane, _FLOAT), align=4), factor)
            bits = builder.bitcast(value, _lanes(_INT))
            lower = builder.and_(builder.xor(bits, builder.ashr(bits, _all(_INT, 31))), mask)
            entry = to.gather(table, builder.lshr(bits, num_bits), _INT)
            code = builder.lshr(builder.add(entry, lower), num_bits)
            builder.store(builder.trunc(code, _lanes(_BYTE)), to.at(target, lane, _BYTE), align=1)
        return context.get_dummy_value()

    return types.void(codes, x, table, inverse, num_lower), emit


# Their forms for numbers, in the same roundings.
overload(quotient)(lambda a, b: lambda a, b: a / b)
overload(root)(lambda x: lambda x: np.sqrt(x))
overload(sign)(lambda x: lambda x: np.sign(x))

# One loop for each number of states: numba makes no tuple whose length it does not know.


def _loop_1(update: Any) -> Any:
    def loop(changed: Any, other: Any, states: Any, scalars: Any) -> None:
        one = states[0]
        for i in range(BLOCK):
            changed[i], (one[i],) = update(changed[i], other[i], (one[i],), scalars)

    return loop


def _loop_2(update: Any) -> Any:
    def loop(changed: Any, other: Any, states: Any, scalars: Any) -> None:
        one, two = states[0], states[1]
        for i in range(BLOCK):
            changed[i], (one[i], two[i]) = update(changed[i], other[i], (one[i], two[i]), scalars)

    return loop


def _loop_3(update: Any) -> Any:
    def loop(changed: Any, other: Any, states: Any, scalars: Any) -> None:
        one, two, three = states[0], states[1], states[2]
        for i in range(BLOCK):
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
    """Step one block of parameter and gradient, both [256], float32."""
    codes, absmax, values, tables, num_lower = quantized
    start, end = at * BLOCK, (at + 1) * BLOCK
    for state in range(len(codes)):
        dequantize_block(states[state], codes[state][start:end], values[state], absmax[state][at])
    update(changed, other, states, scalars)
    for state in range(len(codes)):
        absmax[state][at : at + 1].view(np.int32)[0] = largest_of_block(states[state])
        inverse = np.float32(1) / absmax[state][at]
        if np.isinf(inverse):
            inverse = np.float32(0)
        quantize_block(codes[state][start:end], states[state], tables[state], inverse, num_lower[state])


@compiled
def _step_blocks(
    update: Any, changed: Any, other: Any, scalars: Any, quantized: Any, bits: Any, first: int, last: int
) -> None:
    """Step whole blocks from first to before last; with bits: of bfloat16, widened and rounded in caches."""
    states, words = np.empty((len(quantized[0]), BLOCK), np.float32), np.empty(NUM_WORDS, np.uint64)
    p, g = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for block in range(first, last):
        start, end = block * BLOCK, (block + 1) * BLOCK
        if bits is None:  # numba compiles one of the two ways
            _step_block(update, changed[start:end], other[start:end], scalars, states, quantized, block)
        else:
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
    batch: BlockBatch | None = None,
) -> None:
    """One step of a slice that starts on a block.

    Args:
        rule: how it changes.
        p: [n], float32, contiguous; bfloat16 if there are `bits`.
        g: the same; replaced by the update where the rule gives that.
        states: of [n].
        scalars: the rule's numbers of this step.
        bits: the random bits of a bfloat16 parameter; only for a rule that gives no update.
        batch: takes the work, for later; None: it is done now.
    """
    assert bits is None or not rule.gives_update, "an update is not rounded"
    update, numbers = _compile(rule), tuple(map(np.float32, scalars))
    changed, other = (g, p) if rule.gives_update else (p, g)
    whole = p.numel() // BLOCK
    later = BlockBatch() if batch is None else batch
    if whole:
        later.add(_work(update, changed, other, numbers, states, bits), whole)
    if p.numel() % BLOCK:
        rest, last = slice(whole * BLOCK, None), [state.part(whole, whole + 1) for state in states]
        bits = bits and bits._replace(start=bits.start + whole * BLOCK)
        _step_cut_block(update, changed[rest], other[rest], numbers, last, bits)
    if batch is None:
        later.run()
    increment_version(changed)  # numpy does not count changes, by which replicated parameters are followed


def _work(
    update: Any,
    changed: Tensor,
    other: Tensor,
    numbers: Any,
    states: Sequence[QuantizedState],
    bits: Bits | None,
) -> Callable[[int, int], None]:
    """The function that steps whole blocks, (first, last)."""
    pair = (changed, other) if bits is None else (changed.view(torch.uint16), other.view(torch.uint16))
    key = None if bits is None else (np.uint64(bits.key), bits.start)
    fixed = (update, *(one.numpy() for one in pair), numbers, _arrays(states), key)
    return lambda first, last: _step_blocks(*fixed, first, last)


def _step_cut_block(
    update: Any,
    changed: Tensor,
    other: Tensor,
    numbers: Any,
    states: Sequence[QuantizedState],
    bits: Bits | None,
) -> None:
    """Step the last block of a parameter, filled up with zeros."""
    filled, whole = _filled(changed, 0), [s._replace(codes=_filled(s.codes, s.book.zero)) for s in states]
    _work(update, filled, _filled(other, 0), numbers, whole, bits)(0, 1)
    changed.copy_(filled[: changed.numel()])
    for state, one in zip(states, whole, strict=True):
        state.codes.copy_(one.codes[: changed.numel()])


def _filled(part: Tensor, value: int) -> Tensor:
    filled = part.new_full((BLOCK,), value)
    filled[: part.numel()] = part
    return filled


def _arrays(states: Sequence[QuantizedState]) -> tuple[tuple[Any, ...], ...]:
    rows = [
        (codes.numpy(), absmax.numpy(), book.values.numpy(), book.table.numpy(), np.int32(book.num_lower))
        for codes, absmax, book in states
    ]
    return tuple(zip(*rows, strict=True))
