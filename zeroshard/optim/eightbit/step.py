"""One step of a slice, by what its device has for it.

On a GPU these are bitsandbytes' operators, on the CPU one pass over memory compiled by numba. Without these,
torch operations do it a chunk at a time: slower, and on the CPU with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.internals.libraries import is_usable
from zeroshard.optim.eightbit.blocks import QuantizedState, StateValues, num_blocks
from zeroshard.optim.eightbit.rule import Numbers, Rule
from zeroshard.plan.layout import BLOCK
from zeroshard.stepping.rounding import Bits, round_into
from zeroshard.stepping.threads import BlockBatch

_CHUNK = 1 << 10
"""Blocks that are worked on together on the CPU; more let their scratch memory out of the caches."""
_CHUNK_GPU = 1 << 14


def take_step(
    rule: Rule,
    p: Tensor,
    g: Tensor,
    states: Sequence[StateValues],
    numbers: Numbers,
    bits: Bits | None = None,
    batch: BlockBatch | None = None,
) -> None:
    """Change a parameter and its states.

    A parameter of bfloat16 gets the bits of a step in float32 that `round_into` rounds. On the CPU the
    compiled pass widens and rounds a block in the caches. Elsewhere the parameter is widened.

    Args:
        rule: the rule of the update.
        p: [n], float32, contiguous, on any device; from the start of a block. bfloat16 if there are `bits`.
        g: [n], float32, contiguous; replaced by the update where the rule gives that. Of any dtype if there
            are `bits`.
        states: the states of the rule, each of [n], in its order.
        numbers: the hyperparameters of this step.
        bits: the random bits of a bfloat16 parameter; only for a rule that gives no update.
        batch: may take the work of the CPU, for later; None: all is done now.
    """
    quantized = [state for state in states if isinstance(state, QuantizedState)]
    is_compiled = bits is None or g.dtype is torch.bfloat16
    if p.is_cpu and is_compiled and quantized and _has("numba"):
        from zeroshard.optim.eightbit import kernels

        kernels.step(rule, p, g, quantized, rule.scalars(numbers), bits, batch)
    elif bits is not None:
        wide = p.float()
        take_step(rule, wide, g.float(), states, numbers)
        round_into(p, wide, *bits)
    elif p.is_cuda and rule.operator is not None and _has("bitsandbytes"):
        from zeroshard.optim.eightbit import operators

        operators.step(rule, p, g, states, numbers)
    else:
        step_in_chunks(rule, p, g, states, numbers)


def step_in_chunks(rule: Rule, p: Tensor, g: Tensor, states: Sequence[StateValues], numbers: Numbers) -> None:
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


def _has(library: str) -> bool:
    return is_usable(library, "8-bit optimizer states")
