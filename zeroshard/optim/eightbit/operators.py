"""bitsandbytes' operators, for its own optimizers on a GPU: their step on the whole parameter, to the bit.

AdEMAMix is the exception: the operator wants both averages in one tensor, and lets their scales overlap where
the size is no multiple of 256. So the last block goes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import bitsandbytes.functional as F
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.optim.eightbit.blocks import Exact, QuantizedState, StateValues
from zeroshard.optim.eightbit.rule import Numbers, Rule
from zeroshard.plan.layout import BLOCK


def step(rule: Rule, p: Tensor, g: Tensor, states: Sequence[StateValues], numbers: Numbers) -> None:
    """Take a step of AdEMAMix, on a GPU; arguments as `take_step`."""
    whole = p.numel() // BLOCK
    for first, last in ((0, whole), (whole, whole + 1)):
        part = slice(first * BLOCK, last * BLOCK)
        if p[part].numel():
            fast, slow, squares = (state.part(first, last) for state in states)
            both = _stack(fast, slow)
            call(rule, p[part], g[part], both, squares, numbers)
            _unstack(both, fast, slow)


def call(
    rule: Rule, p: Tensor, g: Tensor, one: StateValues, two: StateValues | None, numbers: Numbers
) -> None:
    """A step by one operator; also on the CPU, if the states are exact.

    Args:
        rule: one that bitsandbytes has.
        p: contiguous.
        g: the same.
        one: the first state, or of AdEMAMix two in one tensor of [2, n].
        two: the last one, if there is another.
        numbers: of this step.
    """
    increment_version(p)  # operators change it unseen by autograd, and replicated parameters follow changes
    assert rule.operator is not None, "only these rules are called so"
    beta1, beta2, beta3 = (*numbers.betas, 0.0, 0.0)[:3]
    moving = beta1, beta2, beta3, (alpha := numbers.settings.get("alpha", 0.0))
    if isinstance(one, QuantizedState):
        assert two is None or isinstance(two, QuantizedState), "quantized alike"
        F.optimizer_update_8bit_blockwise(
            rule.operator,
            g,
            p,
            one.codes,
            two and two.codes,
            *moving,
            numbers.eps,
            numbers.step,
            numbers.lr,
            one.book.values,
            two and two.book.values,
            one.absmax,
            two and two.absmax,
            numbers.weight_decay,
        )
        return
    F.optimizer_update_32bit(
        rule.operator,
        g,
        p,
        one.load(),
        beta1,
        numbers.eps,
        numbers.step,
        numbers.lr,
        two.load() if two is not None else None,
        beta2,
        beta3,
        alpha,
        numbers.weight_decay,
    )


def _stack(fast: StateValues, slow: StateValues) -> StateValues:
    """One state of both; the first two parts of a state are its tensors."""
    stacked = [torch.stack(pair) for pair in zip(fast[:2], slow[:2], strict=True)]
    if isinstance(fast, QuantizedState):
        return QuantizedState(stacked[0], stacked[1], fast.book)
    return Exact(stacked[0])


def _unstack(both: StateValues, fast: StateValues, slow: StateValues) -> None:
    for at, one in enumerate((fast, slow)):
        for values, rows in zip(one[:2], both[:2], strict=True):
            values.copy_(rows[at])
