"""1-bit Adam: after a warm-up, momenta are exchanged as signs.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
algorithm 1, with the details of DeepSpeed's `OnebitAdam`.

    warm-up    Adam without bias correction, over the mean gradient; then the variance stays as it is
    worker     c = m + e of each parameter; its signs, with the scale |c| / sqrt(n), go to the ranks that
               serve a part of it; e = c - scale sign(c) stays
    server     d = the mean of what came, plus an error of its own; signs and scale of d go to all ranks

Signs of all parameters go together: a rank sends one message to each other rank, twice a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroshard.comm.collectives import Axis, all_to_all
from zeroshard.comm.watch.status import REDUCE
from zeroshard.gradient_hooks import GradientBucket, GradientHook
from zeroshard.internals.warn import warn_user
from zeroshard.optim.ranges import ChecksRanges, Ranges, betas_range, called, dense, number_range
from zeroshard.stepping.norms import name_of


class OneBitAdam(ChecksRanges):
    """Adam that exchanges one bit for each element of the momentum, at stage 0.

    With gradient g and weights w, momentum m, variance v, learning rate η and weight decay λ:

        m = β1 m + (1 - β1) g,  v = β2 v + (1 - β2) g²,  w = w - η (m / (√v + ε) + λ w)

    In the first `freeze_step` steps g is the mean of all ranks. After them v stays as it is, each rank
    advances m by its own gradient, and the ranks take the mean of their momenta, compressed; see the head of
    the file. There is no bias correction, as in DeepSpeed. Nothing is compressed on one rank, nor by an
    optimizer that `zeroshard.initialize` was not given.

    An element whose v is 0 after the warm-up never had a gradient. It only decays from then on, and a warning
    says so: signs cannot say zero. DeepSpeed has a mask for such elements, `exp_avg_mask`.

    Gradients of ranks differ after the warm-up, so clipping and `nonfinite` are refused. Checkpoints hold
    the errors of each rank, which DeepSpeed drops; with another number of ranks these are not loaded.

    Args:
        params: parameters, of any shape, or groups of them.
        lr: η.
        freeze_step: the steps of the warm-up. The paper takes 15 to 20% of all steps, and at least until the
            learning rate has risen.
        betas: β1, β2.
        eps: ε.
        weight_decay: λ.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """

    ranges: ClassVar[Ranges] = {
        **dict.fromkeys(("lr", "eps", "weight_decay"), number_range()),
        "betas": betas_range(2),
        "freeze_step": (lambda x: type(x) is int and x >= 1, "an integer >= 1"),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        own = {"lr": lr, "freeze_step": freeze_step, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, own)
        self._axis: Axis | None = None
        self.left = SimpleNamespace(errors=dict[int, list[Tensor]]())
        """The values that signs have left out so far, on this rank alone. Of each parameter, by its number:
        as a worker, [ranks, part], and as the server of a part, [1, part]."""

    @property
    def is_frozen(self) -> bool:
        """True when the warm-up is over: as soon as it is for one parameter."""
        pairs = ((self.state.get(p), group) for group in self.param_groups for p in group["params"])
        return any(state and state["step"] >= group["freeze_step"] for state, group in pairs)

    def hook_over(self, axis: Axis) -> GradientHook:
        """Exchange momenta over data-parallel ranks, and return the hook that then leaves gradients alone."""
        self._axis = axis
        return GradientHook(self.left, one_bit_adam, axis, lambda: self.is_frozen)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; collective after the warm-up.

        Raises:
            RuntimeError: a sparse gradient; or a parameter without a gradient in the warm-up has one now.
        """
        loss, is_frozen = called(closure), self.is_frozen
        pairs = enumerate((p, group) for group in self.param_groups for p in group["params"])
        stepped = {number: (p, group) for number, (p, group) in pairs if p.grad is not None}
        for p, group in stepped.values():
            self._advance(p, dense(p.grad), group, is_frozen)
        if is_frozen and self._axis is not None and self._axis.size > 1 and stepped:
            self._exchange({at: self.state[p]["exp_avg"] for at, (p, _) in stepped.items()}, self._axis)
        for p, group in stepped.values():
            momentum, variance = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
            if is_frozen:
                momentum.mul_(variance > 0)
            update = momentum / (variance.sqrt() + group["eps"])
            p.sub_(update.add_(p, alpha=group["weight_decay"]), alpha=group["lr"])
        zeros = (int((state["exp_avg_sq"] == 0).sum()) for state in self.state.values())
        if self.is_frozen and not is_frozen and (num := sum(zeros)):
            warn_user(f"OneBitAdam: {num} elements had no gradient in the warm-up, and only decay now")
        return loss

    def _advance(self, p: Tensor, grad: Tensor, group: dict[str, Any], is_frozen: bool) -> None:
        if not (state := self.state[p]):
            if is_frozen:
                raise RuntimeError(
                    f"OneBitAdam: {name_of(p)} had no gradient in the warm-up, and so has no variance: "
                    "freeze it by requires_grad_(False), or begin anew with all that is to be trained"
                )
            state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        beta1, beta2 = group["betas"]
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        if not is_frozen:
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _exchange(self, momenta: Mapping[int, Tensor], axis: Axis) -> None:
        """Replace momenta, [n] each, by their means over the ranks, compressed."""
        num, sizes = axis.size, [momentum.numel() for momentum in momenta.values()]
        # The elements that a rank serves of each parameter, and those of this rank that are no padding.
        widths = [-(-size // (8 * num)) * 8 for size in sizes]
        served = [min(max(size - axis.rank * w, 0), w) for size, w in zip(sizes, widths, strict=True)]
        label = f"signs of {len(sizes)} momenta of {sum(sizes)} elements"
        axis.ledger.note(label, REDUCE)  # other sizes on another rank would end the process
        axis.any([False], f"agreement on {label}", compares=True)()
        for (number, momentum), width in zip(momenta.items(), widths, strict=True):
            if number not in self.left.errors:
                self.left.errors[number] = [momentum.new_zeros(rows, width) for rows in (num, 1)]
        workers, servers = zip(*(self.left.errors[number] for number in momenta), strict=True)
        values = [
            F.pad(momentum, (0, error.numel() - momentum.numel())).view_as(error) + error
            for momentum, error in zip(momenta.values(), workers, strict=True)
        ]
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))  # of the scales
        received = _trade(axis, _compress(values, sizes, workers), label)
        means = _decompress(received, widths, dtype).mean(0, keepdim=True).split(widths, dim=1)
        values = [mean + error for mean, error in zip(means, servers, strict=True)]
        received = _trade(axis, _compress(values, served, servers).expand(num, -1), label)
        results = _decompress(received, widths, dtype).split(widths, dim=1)
        for momentum, result in zip(momenta.values(), results, strict=True):
            momentum.copy_(result.reshape(-1)[: momentum.numel()])


def _compress(values: Sequence[Tensor], sizes: Sequence[int], errors: Sequence[Tensor]) -> Tensor:
    """Return signs as bits, after the scales of all values; errors get what these leave out.

    Args:
        values: [rows, width] each.
        sizes: the elements of each that are no padding; the others count as 0.
        errors: in the shape of the values.

    Returns:
        [rows, bytes], uint8.
    """
    for value, size in zip(values, sizes, strict=True):
        value.view(-1)[size:] = 0
    scales = torch.stack([v.norm() / math.sqrt(max(1, n)) for v, n in zip(values, sizes, strict=True)])
    signs = [value >= 0 for value in values]  # of 0, and of padding, it is +1
    for value, size, sign, scale, error in zip(values, sizes, signs, scales, errors, strict=True):
        error.copy_(value - torch.where(sign, scale, -scale)).view(-1)[size:] = 0
    bits = torch.cat(signs, dim=1).unflatten(1, (-1, 8)).to(torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    packed = (bits << places).sum(2, dtype=torch.uint8)
    return torch.cat([scales.view(torch.uint8).expand(len(packed), -1), packed], dim=1)


def _decompress(rows: Tensor, widths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values, [rows, elements], that `_compress` has made bytes of."""
    num_bytes = len(widths) * dtype.itemsize
    scales = rows[:, :num_bytes].contiguous().view(dtype).split(1, dim=1)
    wide = torch.cat([scale.expand(-1, width) for scale, width in zip(scales, widths, strict=True)], dim=1)
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    signs = (rows[:, num_bytes:, None] >> places & 1).bool().flatten(1)
    return torch.where(signs, wide, -wide)


def _trade(axis: Axis, rows: Tensor, label: str) -> Tensor:
    """Send a row to each rank, and return the rows that the ranks have for this one, in rank order."""
    sent = [(rank, row) for rank, row in enumerate(rows) if rank != axis.rank]
    received = iter(all_to_all(axis, sent, [(rank, row.nbytes) for rank, row in sent], label=label))
    return torch.stack([row if rank == axis.rank else next(received) for rank, row in enumerate(rows)])


def one_bit_adam(_: object, bucket: GradientBucket) -> torch.futures.Future[Any]:
    """Leave gradients as each rank has them: the gradient hook of the optimizer, after its warm-up."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
