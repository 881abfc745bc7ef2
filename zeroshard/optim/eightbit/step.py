"""One step of a slice, by what its device has for it.

On a GPU these are bitsandbytes' operators, on the CPU one pass over memory compiled by numba. Without these,
torch operations do it a chunk at a time: slower, and on the CPU with the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from torch import Tensor

from zeroshard.optim.eightbit.blocks import Quantized, State, num_blocks
from zeroshard.optim.eightbit.rule import Numbers, Rule
from zeroshard.plan.layout import BLOCK

_CHUNK = 1 << 10
"""Blocks that are worked on together on the CPU; more let their scratch memory out of the caches."""
_CHUNK_GPU = 1 << 14


def take_step(rule: Rule, p: Tensor, g: Tensor, states: Sequence[State], numbers: Numbers) -> None:
    """Change a parameter and its states.

    Args:
        rule: the rule of the update.
        p: [n], float32, contiguous, on any device; from the start of a block.
        g: [n], float32, contiguous; replaced by the update where the rule gives that.
        states: the states of the rule, each of [n], in its order.
        numbers: the hyperparameters of this step.
    """
    quantized = [state for state in states if isinstance(state, Quantized)]
    if p.is_cuda and rule.operator is not None and _has("bitsandbytes"):
        from zeroshard.optim.eightbit import operators

        operators.step(rule, p, g, states, numbers)
    elif p.is_cpu and quantized and _has("numba"):
        from zeroshard.optim.eightbit import kernels

        kernels.step(rule, p, g, quantized, rule.scalars(numbers))
    else:
        step_in_chunks(rule, p, g, states, numbers)


def step_in_chunks(rule: Rule, p: Tensor, g: Tensor, states: Sequence[State], numbers: Numbers) -> None:
    """Take a step in torch operations, on any device; arguments as `take_step`."""
    scalars = rule.scalars(numbers)
    total, size = num_blocks(p.numel()), _CHUNK if p.is_cpu else _CHUNK_GPU
    for first in range(0, total, size):
        part = slice(first * BLOCK, (first + size) * BLOCK)
        parts = [state.part(first, first + size) for state in states]
        result, values = rule.update(p[part], g[part], tuple(state.load() for state in parts), scalars)
        (g if rule.gives_update else p)[part] = result
        for state, value in zip(parts, values, strict=True):
            state.store(value)


@cache
def _has(library: str) -> bool:
    """True if the library that makes steps fast is there and works; warn once if not."""
    try:
        import_module(library)
    except Exception as error:  # a library that was built for another one may raise anything
        warnings.warn(
            f"8-bit optimizer states without {library} ({error}): steps take several times as long. "
            f"pip install {library}",
            stacklevel=2,
        )
        return False
    return True
