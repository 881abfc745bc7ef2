"""Embeddings, and losses over logits, that are divided over the tensor ranks by the vocabulary.

Each rank has the rows of a range of tokens, and computes the logits of that range. Nobody has all logits.
Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroshard.comm.activations import Activations
from zeroshard.parallel.tensor.moves import Sum, add_up
from zeroshard.plan.layout import Span


def embed(
    tokens: Tensor,
    look_up: Callable[[Tensor], Tensor],
    own: Span,
    over: Activations,
    label: str,
    add: Sum = add_up,
) -> Tensor:
    """Look up tokens in a table whose rows are divided over the ranks.

    Args:
        tokens: any shape, integers in [0, vocabulary); the same on all ranks.
        look_up: finds rows of this rank, counted from its first one: [*tokens.shape] -> [*tokens.shape, d].
        own: the tokens of these rows.
        over: the exchanges of the tensor ranks.
        label: the name of the layer, for messages.
        add: adds up what the ranks have found.

    Returns:
        [*tokens.shape, d], the same on all ranks; or what `add` gives.
    """
    num, is_unknown = own.size * over.size, (tokens < 0) | (tokens >= own.size * over.size)
    if tokens.device.type == "cpu" and is_unknown.any():
        raise IndexError(f"'{label}': expected tokens in [0, {num}), got {tokens[is_unknown][0].item()}")
    is_elsewhere = (tokens < own.start) | (tokens >= own.stop)
    found = look_up((tokens - own.start).masked_fill(is_elsewhere, 0))
    if tokens.device.type != "cpu":  # where the host would have to wait for an error
        found = found.masked_fill(is_unknown.unsqueeze(-1), math.nan)
        is_elsewhere &= ~is_unknown
    return add(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), over, label)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    own: Span,
    over: Activations,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of `torch.nn.functional.cross_entropy` over logits that are divided by classes.

    One exchange of three numbers for each row: the largest logit of each rank, its sum of exponentials, and
    the logit of the target; with smoothing, the sum of logits too.

    Args:
        logits: [N, own.size], this rank's classes, in the dtype of the sums.
        targets: [N], integers in [0, classes) or `ignore_index`; the same on all ranks.
        own: the classes of this rank.
        over: the exchanges of the tensor ranks.
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count, "sum" or "none".
        label_smoothing: the part of a target that all classes share, in [0, 1].

    Returns:
        0-dim, or [N] for "none"; the same on all ranks. On an accelerator the loss of a target that is no
        class is not a number: an error would make the host wait.

    Raises:
        ValueError: another reduction or smoothing.
        IndexError: a target is no class; on the CPU.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {label_smoothing}")
    counts, num_classes = targets != ignore_index, own.size * over.size
    is_none = counts & ((targets < 0) | (targets >= num_classes))
    if targets.device.type == "cpu" and is_none.any():
        wrong = int(targets[is_none][0])
        raise IndexError(f"expected targets in [0, {num_classes}) or {ignore_index}, got {wrong}")
    losses: Tensor = _RowLosses.apply(logits, targets, counts, own, over, label_smoothing)
    losses = losses.masked_fill(is_none, torch.nan)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


class _RowLosses(torch.autograd.Function):
    """[N]: log(sum(exp(logits))) - logits[target], and 0 for rows that do not count.

    Smoothing puts a mean in the place of the logit of the target: it and the mean of all logits, weighted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        counts: Tensor,
        own: Span,
        over: Activations,
        smoothing: float,
    ) -> Tensor:
        is_own = counts & (targets >= own.start) & (targets < own.stop)
        place = (targets - own.start).masked_fill(~is_own, 0).unsqueeze(1)
        of_target = logits.gather(1, place).squeeze(1).masked_fill(~is_own, 0.0)
        largest = logits.amax(1)
        base = largest.where(largest.isfinite(), 0.0)  # a rank whose tokens are all ruled out adds nothing
        sums = (logits - base.unsqueeze(1)).exp_().sum(1)
        numbers = (largest, sums, of_target, *([logits.sum(1)] if smoothing else []))
        everyone = over.gather(torch.stack(numbers).unsqueeze(0), 0, "sums of logits")
        largest = everyone[:, 0].amax(0)
        total = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(0)
        ctx.shared = smoothing / (own.size * over.size)
        expected = everyone[:, 2].sum(0)
        if smoothing:
            expected = (1 - smoothing) * expected + ctx.shared * everyone[:, 3].sum(0)
        ctx.smoothing = smoothing
        ctx.save_for_backward(logits, largest + total.log(), place, is_own, counts)
        return (total.log() + largest - expected).masked_fill(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_total, place, is_own, counts = ctx.saved_tensors
        of_logits = (logits - log_total.unsqueeze(1)).exp_().sub_(ctx.shared)
        of_target = is_own.unsqueeze(1).to(of_logits.dtype).mul_(ctx.smoothing - 1)
        of_logits.scatter_add_(1, place, of_target)
        of_logits.mul_(gradient.masked_fill(~counts, 0.0).unsqueeze(1))
        return of_logits, None, None, None, None, None
