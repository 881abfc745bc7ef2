"""One step of a slice, by what its device has for it.

It is one pass over memory, compiled by Triton on a GPU and by numba on the CPU. Without these, torch
operations do it a chunk at a time: slower, with the same bits.

On the CPU the blocks of a slice are divided among as many threads as torch uses. To begin work in another
thread costs as much as a step of some thousand elements, so each gets many more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from itertools import pairwise

import torch
from torch import Tensor

from zeroshard.internals.warn import works
from zeroshard.optim.eightbit.blocks import QuantizedState, StateValues, codebook
from zeroshard.optim.eightbit.rule import Numbers, Rule
from zeroshard.plan.layout import BLOCK
from zeroshard.stepping.rounding import Bits, has_kernels, round_into

_CHUNK = 1 << 10
"""Blocks that are worked on together on the CPU; more let their scratch memory out of the caches."""
_CHUNK_GPU = 1 << 14


_FEWEST = 256
"""Blocks, of 256 elements, that are worth a thread."""

Work = Callable[[int, int], None]
"""Does the blocks from the first to before the last one."""


def over_threads(work: Work, size: int) -> None:
    """Do a range of blocks, [0, size); return when all is done, and raise the first error of any part."""
    num_threads = max(1, min(torch.get_num_threads(), size // _FEWEST))
    own, *others = pairwise(size * at // num_threads for at in range(num_threads + 1))
    begun = [_pool(os.getpid(), torch.get_num_threads()).submit(work, *part) for part in others]
    try:
        work(*own)
    finally:
        errors = [other.exception() for other in begun]  # none may still write when this returns
    if error := next(filter(None, errors), None):
        raise error


@cache
def _pool(process: int, num_threads: int) -> ThreadPoolExecutor:
    """One for each process: threads don't survive a fork."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="zeroshard-optimizer")


def take_step(
    rule: Rule,
    p: Tensor,
    g: Tensor,
    states: Sequence[StateValues],
    numbers: Numbers,
    bits: Bits | None = None,
) -> None:
    """Change a parameter and its states.

    A parameter of bfloat16 gets the bits of a step in float32 that `round_into` rounds. A compiled pass
    widens and rounds a block in the caches. Without one the parameter is widened.

    Args:
        rule: the rule of the update.
        p: [n], float32, contiguous, on any device; from the start of a block. bfloat16 if there are `bits`.
        g: [n], float32, contiguous; replaced by the update where the rule gives that. Of any dtype if there
            are `bits`.
        states: the states of the rule, each of [n], in its order.
        numbers: the hyperparameters of this step.
        bits: the random bits of a bfloat16 parameter; only for a rule that gives no update.
    """
    quantized = [state for state in states if isinstance(state, QuantizedState)]
    is_compiled = bits is None or g.dtype is torch.bfloat16
    if p.is_cpu and is_compiled and quantized and _has_numba():
        from zeroshard.optim.eightbit import kernels

        kernels.step(rule, p, g, quantized, rule.scalars(numbers), bits)
    elif has_kernel(rule, p.device, len(scalars := rule.scalars(numbers))):
        from zeroshard.optim.eightbit import kernels_gpu

        kernels_gpu.step(rule, p, g, states, scalars, bits)
    elif bits is not None:
        wide = p.float()
        take_step(rule, wide, g.float(), states, numbers)
        round_into(p, wide, *bits)
    else:
        step_in_chunks(rule, p, g, states, numbers)


@cache
def has_kernel(rule: Rule, device: torch.device, num_scalars: int) -> bool:
    """True for a GPU for which Triton compiles a rule; tried once, with a warning where it does not."""

    def step_one() -> None:
        from zeroshard.optim.eightbit import kernels_gpu

        p, g = torch.zeros(2, 1, dtype=torch.float32, device=device)
        states = [QuantizedState.zeros(1, codebook(is_signed, device)) for is_signed in rule.states.values()]
        kernels_gpu.step(rule, p, g, states, (1.0,) * num_scalars)

    return has_kernels(device) and works(step_one, "triton", f"{rule.optimizers[0]} with 8-bit states")


def step_in_chunks(rule: Rule, p: Tensor, g: Tensor, states: Sequence[StateValues], numbers: Numbers) -> None:
    """Take a step in torch operations, on any device; arguments as `take_step`."""
    scalars = rule.scalars(numbers)
    total, size = -(-p.numel() // BLOCK), _CHUNK if p.is_cpu else _CHUNK_GPU
    for first in range(0, total, size):
        part = slice(first * BLOCK, (first + size) * BLOCK)
        parts = [state.part(first, first + size) for state in states]
        result, values = rule.update(p[part], g[part], tuple(state.load() for state in parts), scalars)
        (g if rule.gives_update else p)[part] = result
        for state, value in zip(parts, values, strict=True):
            state.store(value)


@cache
def _has_numba() -> bool:
    return works(lambda: import_module("numba"), "numba", "8-bit optimizer states")
