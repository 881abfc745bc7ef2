"""The loss of a head over a large vocabulary, in tiles of rows: the logits of all rows are never held.

    a tile of hidden states [n, d] --> logits [n, V] --> losses [n], and the gradient of the logits [n, V]
                                                     --> gradients of the tile [n, d] and the weight [V, d]

A row is a token. The forward takes the gradients of the sum over all rows too, while the logits of a tile are
there. The backward multiplies them by the gradient of that sum.

Source: Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.config.sections import TILE_BYTES
from zeroshard.plan.layout import Span


class Row(NamedTuple):
    """Numbers of each row for the gradient of its loss, [n].

    - log_total: log(sum(exp(logits))) over all classes.
    - place: the column of the target; 0 if this rank does not have it.
    - is_own: True if this rank has the target, and the row counts.
    - counts: True if the row counts.
    """

    log_total: Tensor
    place: Tensor
    is_own: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class RowLoss:
    """The loss of rows of logits, whose classes may be divided over ranks.

    With l = log(sum(exp(logits))) it is

        l - (1 - smoothing) logits[target] - smoothing mean(logits) + z_loss l**2

    Source: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision", section 7, for
    smoothing; Chowdhery et al. 2022, "PaLM", section 5, for the square of l.

    - own, num: the classes of this rank, and the number of those of all ranks.
    - gather: [1, k, n] of this rank -> [ranks, k, n].
    """

    own: Span
    num: int
    smoothing: float = 0.0
    z_loss: float = 0.0
    gather: Callable[[Tensor], Tensor] = torch.Tensor.contiguous

    def losses(self, logits: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, Row]:
        """Return the losses, 0 for rows that do not count, and what `gradient` needs.

        Args:
            logits: [n, own classes], at least in float32.
            targets: [n], integers.
            counts: [n], True for rows that count.
        """
        is_own = counts & (targets >= self.own.start) & (targets < self.own.stop)
        place = (targets - self.own.start).masked_fill(~is_own, 0).unsqueeze(1)
        of_target = logits.gather(1, place).squeeze(1).masked_fill(~is_own, 0.0)
        largest = logits.amax(1)
        base = largest.where(largest.isfinite(), 0.0)  # a rank whose tokens are all ruled out adds nothing
        sums = (logits - base.unsqueeze(1)).exp_().sum(1)
        numbers = (largest, sums, of_target, *([logits.sum(1)] if self.smoothing else []))
        everyone = self.gather(torch.stack(numbers).unsqueeze(0))
        largest = everyone[:, 0].amax(0)
        log_sum = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(0).log()
        expected = everyone[:, 2].sum(0)
        if self.smoothing:
            shared = self.smoothing / self.num * everyone[:, 3].sum(0)
            expected = (1 - self.smoothing) * expected + shared
        log_total = largest + log_sum
        losses = log_total - expected
        if self.z_loss:
            losses = losses + self.z_loss * log_total.square()
        return losses.masked_fill(~counts, 0.0), Row(log_total, place, is_own, counts)

    def gradient(self, logits: Tensor, row: Row, of_losses: Tensor | None = None) -> Tensor:
        """Return the gradient of the logits, [n, own classes].

        Args:
            logits: as for `losses`.
            row: as `losses` gave it.
            of_losses: [n], the gradient of the losses; None: 1.
        """
        gradient = (logits - row.log_total.unsqueeze(1)).exp_()
        if self.z_loss:
            gradient.mul_((1 + 2 * self.z_loss * row.log_total).unsqueeze(1))
        if self.smoothing:
            gradient.sub_(self.smoothing / self.num)
        of_target = row.is_own.unsqueeze(1).to(gradient.dtype).mul_(self.smoothing - 1)
        gradient.scatter_add_(1, row.place, of_target)
        factor = row.counts if of_losses is None else of_losses.masked_fill(~row.counts, 0.0)
        return gradient.mul_(factor.unsqueeze(1))


class TiledLoss(torch.autograd.Function):
    """0-dim: the sum of the losses of all rows.

    Its arguments have one dtype: hidden [N, d], weight [classes of this rank, d], bias or None; targets [N];
    counts [N], True for rows that count; the loss of a row; the rows of a tile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        counts: Tensor,
        loss: RowLoss,
        size: int,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        needs = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None
        for start in range(0, len(hidden), size):
            tile = slice(start, start + size)
            logits = F.linear(hidden[tile], weight, bias).to(wide)
            losses, row = loss.losses(logits, targets[tile], counts[tile])
            total += losses.sum()
            if any(needs):
                logits = loss.gradient(logits, row)  # those of the tile are not needed any more
                if of_bias is not None:
                    of_bias += logits.sum(0)
                logits = logits.to(hidden.dtype)
                if of_hidden is not None:
                    torch.mm(logits, weight, out=of_hidden[tile])
                if of_weight is not None:
                    of_weight += logits.t() @ hidden[tile]
            del logits  # before those of the next tile
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("a loss in tiles has no second derivatives: expected create_graph=False")

        found = (
            None if one is None else torch.mul(one, gradient, out=torch.empty_like(one, dtype=ctx.dtype))
            for one in ctx.saved_tensors
        )
        return *found, None, None, None, None


def rows_of_tile(num: int, tiles: int | str, row_bytes: int) -> int:
    """Return the rows of each tile.

    Args:
        num: all rows.
        tiles: the tiles; "auto": as few as keep each one within `TILE_BYTES`.
        row_bytes: the bytes of a row in a tile.
    """
    return max(1, TILE_BYTES // row_bytes if isinstance(tiles, str) else -(-num // tiles))
