"""Operations on a block of 256 floats that LLVM does not vectorize by itself: table lookups, the maximum.

They are written in LLVM's own terms, in vectors of 16 lanes; LLVM maps these to what the processor has.
Needs numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from zeroshard.plan.layout import BLOCK

_LANES = 16
_FLOAT, _INT, _BYTE, _LONG, _BIT = (
    ir.FloatType(),
    ir.IntType(32),
    ir.IntType(8),
    ir.IntType(64),
    ir.IntType(1),
)


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, _LANES)


def _all(value: int) -> ir.Constant:
    """An integer in each lane."""
    return ir.Constant(_vector(_INT), [value] * _LANES)


def _alignment(element: ir.Type) -> int:
    """Bytes; arrays may start anywhere that suits one element."""
    return 1 if element is _BYTE else 4


class _Emitter:
    """Writes instructions; arrays are contiguous and of one dimension."""

    def __init__(self, context: Any, builder: Any, signature: Any) -> None:
        self._context, self.builder, self._kinds = context, builder, iter(signature.args)

    def start(self, array: Any, element: ir.Type) -> Any:
        """The address of an array's first element; for each argument in turn."""
        data = self._context.make_array(next(self._kinds))(self._context, self.builder, array).data
        return self.builder.bitcast(data, element.as_pointer())

    def place(self, start: Any, lane: int, element: ir.Type) -> Any:
        """The address of the vector that begins at an element."""
        address = self.builder.gep(start, [ir.Constant(_LONG, lane)])
        return self.builder.bitcast(address, _vector(element).as_pointer())

    def load(self, start: Any, lane: int, element: ir.Type) -> Any:
        return self.builder.load(self.place(start, lane, element), align=_alignment(element))

    def store(self, value: Any, start: Any, lane: int, element: ir.Type) -> None:
        self.builder.store(value, self.place(start, lane, element), align=_alignment(element))

    def spread(self, value: Any, element: ir.Type) -> Any:
        """A number in each lane."""
        undefined = ir.Constant(_vector(element), ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(_INT, 0))
        return self.builder.shuffle_vector(first, undefined, _all(0))

    def gather(self, start: Any, indices: Any, element: ir.Type) -> Any:
        """table[index] in each lane, of 4 bytes."""
        builder, nothing = self.builder, ir.Constant(_vector(element), ir.Undefined)
        four = ir.Constant(_vector(_LONG), [2] * _LANES)
        offsets = builder.shl(builder.zext(indices, _vector(_LONG)), four)
        pointers = ir.VectorType(element.as_pointer(), _LANES)
        addresses = builder.add(offsets, self.spread(builder.ptrtoint(start, _LONG), _LONG))
        name = f"llvm.masked.gather.v{_LANES}{'f32' if element is _FLOAT else 'i32'}.v{_LANES}p0"
        kind = ir.FunctionType(_vector(element), [pointers, _INT, _vector(_BIT), _vector(element)])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        mask = ir.Constant(_vector(_BIT), [1] * _LANES)
        places = builder.inttoptr(addresses, pointers)
        return builder.call(function, [places, ir.Constant(_INT, 4), mask, nothing])


@intrinsic
def dequantize_block(typing: Any, out: Any, codes: Any, values: Any, scale: Any) -> Any:
    """out[i] = values[codes[i]] * scale."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _Emitter(context, builder, signature)
        target, source = to.start(args[0], _FLOAT), to.start(args[1], _BYTE)
        table, factor = to.start(args[2], _FLOAT), to.spread(args[3], _FLOAT)
        for lane in range(0, BLOCK, _LANES):
            indices = builder.zext(to.load(source, lane, _BYTE), _vector(_INT))
            to.store(builder.fmul(to.gather(table, indices, _FLOAT), factor), target, lane, _FLOAT)
        return context.get_dummy_value()

    return types.void(out, codes, values, scale), emit


@intrinsic
def largest_of_block(typing: Any, x: Any) -> Any:
    """max |x[i]|; NaN where there is one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _Emitter(context, builder, signature)
        source, largest = to.start(args[0], _INT), _all(0)
        for lane in range(0, BLOCK, _LANES):  # magnitudes of floats compare as integers, NaN above infinity
            bits = builder.and_(to.load(source, lane, _INT), _all(0x7FFFFFFF))
            largest = builder.select(builder.icmp_signed(">", bits, largest), bits, largest)
        width = _LANES
        while width > 1:
            width //= 2
            order = ir.Constant(_vector(_INT), [(lane + width) % _LANES for lane in range(_LANES)])
            other = builder.shuffle_vector(largest, ir.Constant(_vector(_INT), ir.Undefined), order)
            largest = builder.select(builder.icmp_signed(">", largest, other), largest, other)
        return builder.bitcast(builder.extract_element(largest, ir.Constant(_INT, 0)), _FLOAT)

    return types.float32(x), emit


@intrinsic
def quantize_block(typing: Any, codes: Any, x: Any, table: Any, inverse: Any, num_lower: Any) -> Any:
    """codes[i] = the nearest one to x[i] * inverse, by the table of a codebook; codebook.py tells how."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _Emitter(context, builder, signature)
        target, source, table = to.start(args[0], _BYTE), to.start(args[1], _FLOAT), to.start(args[2], _INT)
        factor, num_bits = to.spread(args[3], _FLOAT), to.spread(args[4], _INT)
        mask = builder.sub(builder.shl(_all(1), num_bits), _all(1))
        for lane in range(0, BLOCK, _LANES):
            value = builder.fmul(to.load(source, lane, _FLOAT), factor)
            bits = builder.bitcast(value, _vector(_INT))
            lower = builder.and_(builder.xor(bits, builder.ashr(bits, _all(31))), mask)
            entry = to.gather(table, builder.lshr(bits, num_bits), _INT)
            code = builder.lshr(builder.add(entry, lower), num_bits)
            to.store(builder.trunc(code, _vector(_BYTE)), target, lane, _BYTE)
        return context.get_dummy_value()

    return types.void(codes, x, table, inverse, num_lower), emit
