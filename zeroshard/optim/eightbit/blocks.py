"""States of an optimizer, a byte an element with a scale for each block of 256, or in float32.

The 256 values of dynamic tree quantization, and the nearest of them without a search.

A value in [-1, 1] is looked up by the upper bits of its float: sign, exponent and top of the mantissa. In
each such bin lies at most one midpoint between two neighbouring values. So a bin needs one number, to which
the lower bits of the float are added: where they pass the midpoint, a carry makes the code one larger.

    float            s eeeeeeee mmmmmm mmmmmmmmmmmmmmmmm
                     '---- bin ------' '---- lower ----'
    table[bin]       [  code  ] [ 2^17 - 1 - lower bits of the midpoint ]
    code             (table[bin] + lower) >> 17

The lower bits of negative values are taken inverted, since their codes fall as the magnitude grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.optim.eightbit.rule import Rule
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.layout import BLOCK, num_blocks

_NUM_DECADES = 7
_SIGN = 1 << 31
_ONE = 0x3F800000
"""The bits of 1.0, the largest magnitude."""


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """Sorted values, and the table that finds the nearest one; ties go to the lower code."""

    values: Tensor
    """[256], float32, ascending, within [-1, 1]."""
    table: Tensor
    """[2^(32 - num_lower)], int32: what the lower bits of a float are added to, by its upper bits."""
    num_lower: int
    """Bits of a float below the bits of its bin."""

    @property
    def zero(self) -> int:
        """The code of 0."""
        return int((self.values == 0).nonzero())

    def nearest(self, x: Tensor) -> Tensor:
        """The codes of values, int32.

        Args:
            x: float32, within [-1, 1].
        """
        bits = x.view(torch.int32)
        bins = bits.bitwise_right_shift(self.num_lower).bitwise_and_(self.table.numel() - 1)
        lower = bits.bitwise_right_shift(31).bitwise_xor_(bits).bitwise_and_((1 << self.num_lower) - 1)
        return lower.add_(self.table.index_select(0, bins)).bitwise_right_shift_(self.num_lower)


@cache
def codebook(is_signed: bool, device: torch.device) -> Codebook:
    """The codebook for states of either sign, such as momentum, or for states that are never negative."""
    if device.type != "cpu":
        book = codebook(is_signed, torch.device("cpu"))
        return replace(book, values=book.values.to(device), table=book.table.to(device))
    values = dynamic_values(is_signed)
    num_lower = 17 if is_signed else 16
    return Codebook(values, _build_table(values, num_lower), num_lower)


def dynamic_values(is_signed: bool) -> Tensor:
    """[256], ascending: each of seven decades holds the middles of twice as many parts as the one below it.

    Source: Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning", section 2.2; rounded as
    bitsandbytes' `create_dynamic_map` rounds, so that codes mean the same there.
    """
    parts = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for decade in range(_NUM_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade if is_signed else decade + 1) + 1, dtype=torch.float32)
        magnitudes = 10.0 ** (decade - _NUM_DECADES + 1) * ((edges[:-1] + edges[1:]) / 2)
        parts += [magnitudes, -magnitudes] if is_signed else [magnitudes]
    return torch.cat(parts).sort().values


def _build_table(values: Tensor, num_lower: int) -> Tensor:
    """int32, one entry for each bin."""
    assert values.unique().numel() == values.numel() == 256, "codes of one byte"
    exact = (values[1:].double() + values[:-1].double()) / 2
    midpoints = exact.float()
    # Rounded down: a float is above the exact midpoint if and only if it is above this.
    midpoints = torch.where(midpoints.double() > exact, midpoints.nextafter(torch.tensor(-2.0)), midpoints)
    mask = (1 << num_lower) - 1
    starts = torch.arange(1 << (32 - num_lower)) << num_lower
    codes = [torch.searchsorted(midpoints, _floats(bits)) for bits in (starts, starts + mask)]
    assert ((codes[0] - codes[1]).abs() <= 1).all(), "a bin holds at most one midpoint"
    code = torch.minimum(*codes)
    at_midpoint = midpoints[code.clamp(max=254)].view(torch.int32) & mask
    room = torch.where(starts < _SIGN, mask - at_midpoint, at_midpoint)
    return ((code << num_lower) + torch.where(codes[0] != codes[1], room, 0)).int()


def _floats(bits: Tensor) -> Tensor:
    """The floats with these bits, int64; NaN and numbers beyond [-1, 1] become the nearer end."""
    magnitudes = (bits & (_SIGN - 1)).clamp(max=_ONE).int().view(torch.float32)
    return torch.where(bits < _SIGN, magnitudes, -magnitudes)


class Exact(NamedTuple):
    """Values as they are."""

    values: Tensor
    """[n], float32."""

    def part(self, first: int, last: int) -> Exact:
        """The state of a range of blocks."""
        return Exact(self.values[first * BLOCK : last * BLOCK])

    def load(self) -> Tensor:
        """Return the memory of the values itself, [n], float32."""
        return self.values

    def store(self, values: Tensor) -> None:
        """Copy the values, [n], float32."""
        self.values.copy_(values)


class QuantizedState(NamedTuple):
    """Values of one byte."""

    codes: Tensor
    """[n], uint8."""
    absmax: Tensor
    """[ceil(n / 256)], float32: the largest magnitude of each block."""
    book: Codebook
    """The values of the codes."""

    @staticmethod
    def zeros(num: int, book: Codebook) -> QuantizedState:
        """`num` zeros."""
        codes = torch.full((num,), book.zero, dtype=torch.uint8, device=book.values.device)
        scales = torch.zeros(num_blocks(num), dtype=torch.float32, device=codes.device)
        return QuantizedState(codes, scales, book)

    def part(self, first: int, last: int) -> QuantizedState:
        """The state of a range of blocks."""
        return QuantizedState(self.codes[first * BLOCK : last * BLOCK], self.absmax[first:last], self.book)

    def load(self) -> Tensor:
        """[n], float32, in memory of their own."""
        values = self.book.values.index_select(0, self.codes.int())
        _by_blocks(values).mul_(self.absmax[: values.numel() // BLOCK, None])
        if rest := values.numel() % BLOCK:
            values[-rest:].mul_(self.absmax[-1])
        return values

    def store(self, values: Tensor) -> None:
        """Store the nearest codes of values, [n], float32, each block scaled by 1 / absmax; ties go down.

        A block whose largest magnitude is so small that its inverse is infinite becomes zeros.
        """
        missing = -values.numel() % BLOCK
        rows = _by_blocks(torch.nn.functional.pad(values, (0, missing)) if missing else values)
        torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=self.absmax).abs_()  # no zeros with a sign
        inverse = self.absmax.reciprocal()
        inverse.masked_fill_(inverse.isinf(), 0.0)
        codes = self.book.nearest((rows * inverse[:, None]).view(-1))
        self.codes.copy_(codes[: values.numel()])


StateValues = Exact | QuantizedState
"""One state of a slice that starts on a block."""


def _by_blocks(values: Tensor) -> Tensor:
    """[whole blocks, 256], a view."""
    return values[: values.numel() // BLOCK * BLOCK].view(-1, BLOCK)


# --------------------------------------------------------------------------------- states of a parameter


ABSMAX = "_absmax"
"""The ending of the name of a state's scales."""


def begin(rule: Rule, parameter: Tensor, min_8bit_size: int) -> dict[str, Any]:
    """Return the first state of a parameter, by name: zeros, and a count of steps.

    Args:
        rule: the rule, with the names of its states.
        parameter: a parameter, or a slice, of any shape. States have this shape in float32; quantized ones
            are uint8 codes of this shape and scales, [ceil(n / 256)], float32, under `<name>_absmax`.
        min_8bit_size: elements of a whole parameter from which states are quantized.
    """
    state: dict[str, Any] = {"step": 0}
    is_quantized = whole_size(parameter) >= min_8bit_size
    for name, is_signed in rule.states.items():
        if is_quantized:
            zeros = QuantizedState.zeros(parameter.numel(), codebook(is_signed, parameter.device))
            state[name], state[name + ABSMAX] = zeros.codes.view(parameter.shape), zeros.absmax
        else:
            state[name] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    return state


def read(rule: Rule, state: Mapping[str, Any]) -> list[StateValues]:
    """The states of a parameter that has begun."""
    return [
        held(state[name].view(-1), state.get(name + ABSMAX), is_signed)
        for name, is_signed in rule.states.items()
    ]


def held(values: Tensor, absmax: Tensor | None, is_signed: bool) -> StateValues:
    """Return a state that is held in float32, or as codes if it has scales."""
    if absmax is None:
        return Exact(values)
    return QuantizedState(values, absmax, codebook(is_signed, values.device))


def whole_size(parameter: Tensor) -> int:
    """Return the number of elements of a parameter over all ranks."""
    return parameter.full_shape.numel() if isinstance(parameter, ShardedParameter) else parameter.numel()


def flat(tensor: Tensor | nn.Parameter, *, is_widened: bool = True) -> Tensor:
    """[n], contiguous, no part of a graph, float32 if it is widened; the same memory where possible."""
    values = tensor.detach().reshape(-1)
    return values.float() if is_widened else values
