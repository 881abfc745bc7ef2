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

from zeroshard.optim.eightbit.blocks import QuantizedState, StateValues
from zeroshard.optim.eightbit.rule import Numbers, Rule
from zeroshard.plan.layout import BLOCK


def step(rule: Rule, p: Tensor, g: Tensor, states: Sequence[StateValues], numbers: Numbers) -> None:
    """Take a step of AdEMAMix with quantized states, on a GPU; arguments as `take_step`."""
    quantized = [state for state in states if isinstance(state, QuantizedState)]
    whole = p.numel() // BLOCK
    for first, last in ((0, whole), (whole, whole + 1)):
        part = slice(first * BLOCK, last * BLOCK)
        if p[part].numel():
            fast, slow, squares = (state.part(first, last) for state in quantized)
            codes, absmax = torch.stack((fast.codes, slow.codes)), torch.stack((fast.absmax, slow.absmax))
            call(rule, p[part], g[part], QuantizedState(codes, absmax, fast.book), squares, numbers)
            for one, new_codes, new_absmax in zip((fast, slow), codes, absmax, strict=True):
                one.codes.copy_(new_codes)
                one.absmax.copy_(new_absmax)


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
