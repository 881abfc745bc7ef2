"""Stochastic rounding of float32 to bfloat16, with bits that can be computed anywhere.

A bfloat16 is the upper half of a float32. A random number of 16 bits is added, and may carry into that half.
The probability is in proportion to the distance from the neighbour nearer to zero, so the mean of the results
is the value (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3). Updates far
below the spacing of bfloat16 are kept on average; rounding to nearest would lose every one.

The random bits are a hash, not a generator's: the same at any number of ranks, stage and device.

    key     the first 8 bytes, little-endian, of BLAKE2b of "seed:step:name"
    word n  the n-th output, from 0, of SplitMix64 that starts at `key` (Steele, Lea, Flood 2014, figure 17)
    bits    of element i of the whole parameter: the (i mod 4)-th 16 bits, from the lowest, of word i // 4

Tensor ranks that hold parts of a parameter draw for each part by itself, with its number after the name.
Tensor ranks that hold the same parameter draw the same bits, so that it stays the same.

On a GPU Triton compiles one pass over memory (`bfloat16_gpu.py`); torch operations give the same bits.

An optimizer steps main parameters of bfloat16 in float32, or rounds by itself. `Widening` serves any
optimizer. For the time of a step a parameter holds its values and its gradient in float32. It is the same
object in the same group, so neither the optimizer nor its states need to know. Then the values are rounded
stochastically into the main parameter.

`InPlace` serves an optimizer that `RoundsItself`: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm.collectives import Axis
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import works
from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.stepping.parts import Home, show

_PER_WORD = 4
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_EXPONENT = 0x7F800000
"""The bits of a float32 that are all set in an infinity or a nan."""
_CHUNK_CPU, _CHUNK = 1 << 17, 1 << 22
"""Elements that are rounded at a time: temporary values stay in a CPU's caches."""


@dataclass(slots=True)
class Rounding:
    """Seed and step, which give the random bits together with names; the same on all ranks."""

    seed: int
    step: Annotated[int, range(1 << 53).__contains__]
    """The steps that were taken."""

    @staticmethod
    def agreed(axis: Axis) -> Rounding:
        """Make one with a seed from rank 0's random numbers; collective."""
        return Rounding(axis.all_gather_object(torch.initial_seed(), "seed of stochastic rounding")[0], 0)

    def resume(self, other: Rounding) -> None:
        """Go on with the seed and step of another rounding."""
        self.seed, self.step = other.seed, other.step

    def key(self, name: str) -> int:
        """The seed of a parameter in this step."""
        digest = blake2b(f"{self.seed}:{self.step}:{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


class Bits(NamedTuple):
    """The random bits of a slice in one step: arguments of `round_into`."""

    key: int
    """The key of the parameter in this step."""
    start: int
    """The place of the slice's first element in the whole parameter."""


BitsOf = Callable[[Tensor], Bits | None]
"""(parameter) -> its random bits in this step; None: it is not rounded stochastically."""


@runtime_checkable
class RoundsItself(Protocol):
    """An optimizer that can step parameters and gradients of bfloat16 as they are, and rounds the updates.

    Its results are the bits of a step in float32 followed by `round_into`.
    """

    bits_of: BitsOf
    """The function that gives random bits: `no_bits` until main parameters are of bfloat16."""


def no_bits(parameter: Tensor) -> None:
    """`BitsOf` for parameters that are not rounded stochastically."""


@torch.no_grad()
def round_into(out: Tensor, values: Tensor, key: int, start: int) -> None:
    """Round each value to one of the two bfloat16 around it.

    Args:
        out: [n], bfloat16.
        values: [n], float32; those that are bfloat16 already, infinite or nan stay.
        key: the key of the parameter in this step.
        start: the place of the first value in the whole parameter.
    """
    if values.is_contiguous() and out.is_contiguous() and has_kernels(values.device):
        from zeroshard.stepping import bfloat16_gpu

        bfloat16_gpu.round_into(out, values, key, start)
    else:
        round_in_chunks(out, values, key, start)


@cache
def has_kernels(device: torch.device) -> bool:
    """True for a GPU for which Triton compiles; tried once, with a warning where it does not."""

    def round_one() -> None:
        from zeroshard.stepping import bfloat16_gpu

        values = torch.zeros(1, dtype=torch.float32, device=device)
        bfloat16_gpu.round_into(values.bfloat16(), values, 0, 0)

    return device.type == "cuda" and works(round_one, "triton", f"optimizer steps on {device}")


def round_in_chunks(out: Tensor, values: Tensor, key: int, start: int) -> None:
    """Round in torch operations, on any device; arguments as `round_into`."""
    chunk = _CHUNK_CPU if values.is_cpu else _CHUNK
    for first in range(0, values.numel(), chunk):
        part = values[first : first + chunk]
        bits = random_bits(key, start + first, part.numel(), values.device)
        out[first : first + chunk].copy_(_round(part, bits))


def random_bits(key: int, start: int, num: int, device: torch.device | str = "cpu") -> Tensor:
    """[num], int32, in [0, 65536): random bits for the elements of a parameter from `start` on."""
    first, last = start // _PER_WORD, -(-(start + num) // _PER_WORD)
    words = torch.arange(first, last, device=device).mul_(_signed(_GAMMA)).add_(_signed(key + _GAMMA))
    words = _mix(words, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    words = _mix(words, 27).mul_(_signed(0x94D049BB133111EB))
    lanes = _mix(words, 31).view(torch.int16)  # the lowest first, as all devices store them
    skipped = start - first * _PER_WORD
    return lanes[skipped : skipped + num].int().bitwise_and_(0xFFFF)


def _round(values: Tensor, bits: Tensor) -> Tensor:
    """[n], float32: `bits`, [n], carry into the upper halves of the values; the lower ones become 0."""
    words = values.contiguous().view(torch.int32)
    # A nan is kept as it is: its bits would overflow, or become an infinity's.
    lower = words.bitwise_and(_EXPONENT).ne_(_EXPONENT).mul_(0xFFFF)
    carried = bits.bitwise_and_(lower).add_(words)
    return carried.bitwise_and_(lower.bitwise_not_()).view(torch.float32)


def _mix(words: Tensor, shift: int) -> Tensor:
    """Each word xor itself shifted to the right, zeros coming in."""
    return words.bitwise_xor_(words.bitwise_right_shift(shift).bitwise_and_(_MASK >> shift))


def _signed(word: int) -> int:
    """64 bits as a signed number, as torch takes them; products and sums of torch wrap."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


class InPlace(Home):
    """Leaves parameters as they are, and gives the optimizer their random bits.

    Args:
        starts: the first element of each slice, counted in the whole parameter.
        rounding: the rounding of all steps, which counts them.
    """

    def __init__(self, starts: Mapping[ShardedParameter, int], rounding: Rounding) -> None:
        self._starts, self._rounding = starts, rounding

    def bits_of(self, parameter: Tensor) -> Bits | None:
        """Return the random bits of a main parameter in this step; None for any other tensor."""
        if not isinstance(parameter, ShardedParameter) or parameter not in self._starts:
            return None
        return self._bits(parameter)

    def _bits(self, p: ShardedParameter) -> Bits:
        name = p.fqn if p.cut is None else f"{p.fqn}:{p.tp_rank}"  # each part draws bits of its own
        return Bits(self._rounding.key(name), self._starts[p])

    def end_step(self) -> None:
        """Count a step."""
        self._rounding.step += 1


class Widening(InPlace):
    """Holds parts in float32 for the time of their step, and rounds the values itself."""

    @contextmanager
    def fetched(
        self, stepped: Optimizer, parameters: Sequence[ShardedParameter], number: int
    ) -> Iterator[None]:
        """Hold values and gradients in float32; round the values at the end, but not after an exception."""
        with past_guards():
            narrow = [(p.detach(), gradient_of(p)) for p in parameters]
        try:
            for p, (main, grad) in zip(parameters, narrow, strict=True):
                assert grad is not None, "it is stepped because of it"
                show(p, main.float(), grad.float())
            yield
            with past_guards():
                for p, (main, _) in zip(parameters, narrow, strict=True):
                    round_into(main, p.detach(), *self._bits(p))
        finally:
            for p, (main, grad) in zip(parameters, narrow, strict=True):
                show(p, main, grad)


def load_states(optimizer: Optimizer, load: Callable[[dict[str, Any]], None], saved: dict[str, Any]) -> None:
    """Load states, which keep their dtypes: torch's own load gives them the dtype of their parameter.

    Args:
        optimizer: the optimizer that gets the states.
        load: its own `load_state_dict`.
        saved: the result of a `state_dict()`.
    """
    given: dict[str, Any] = {}  # what other hooks have made of it
    last = optimizer.register_load_state_dict_pre_hook(lambda _, final: given.update(final))
    try:
        load(saved)
    finally:
        last.remove()
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in given["state"].get(number, {}).items():
            if isinstance(loaded := optimizer.state[parameter][key], Tensor):
                optimizer.state[parameter][key] = value.to(loaded.device, copy=True)
