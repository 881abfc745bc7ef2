"""Train a small Llama whose activations keep a few bits of each input for the backward.

    python examples/few_bit.py --bits 2                                 # one rank
    torchrun --nproc-per-node 2 examples/few_bit.py --stage 3 --bits 1

The backward of an activation needs its derivative alone. Here the derivative is taken from 2**bits levels, so
bits per element are kept in the place of the input. The levels are those with the least square error over
[-10, 10], found by dynamic programming. The forward does not change.

Source: Novikov et al. 2022, "Few-Bit Backward: Quantized Gradients of Activation Functions for Memory
Footprint Reduction", section 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import zeroshard
from blocks import collator
from llama import parser, read_text, small_llama

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
REACH, POINTS = 10.0, 2000
"""The derivative is approximated on [-REACH, REACH], at so many points."""


class Levels(NamedTuple):
    """A function that is constant between bounds."""

    bounds: Tensor
    """[levels - 1], ascending."""
    values: Tensor
    """[levels]."""
    error: float
    """The integral of the square of its difference to the derivative."""


def best_levels(function: Callable[[Tensor], Tensor], bits: int) -> Levels:
    """Return the piecewise constant function of 2**bits levels that is nearest to a derivative."""
    step = 2 * REACH / POINTS
    x = (torch.arange(POINTS, dtype=torch.float64) + 0.5) * step - REACH
    (derivative,) = torch.autograd.grad(function(x.requires_grad_()).sum(), x)
    ones, sums, squares = (
        np.concatenate([[0.0], np.cumsum(values)])
        for values in (np.ones(POINTS), derivative.numpy(), derivative.numpy() ** 2)
    )
    num, total, square = (one[None, :] - one[:, None] for one in (ones, sums, squares))
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(num > 0, square - total**2 / num, np.inf)  # of a level from point i to point j
    least, origins = cost[0], []
    for _ in range(2**bits - 1):
        ways = least[:, None] + cost
        origins.append(ways.argmin(0))
        least = ways.min(0)
    ends = [POINTS]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    places = [0, *ends[:0:-1], POINTS]
    values = [total[i, j] / num[i, j] for i, j in pairwise(places)]
    bounds = torch.tensor(places[1:-1], dtype=torch.float64) * step - REACH
    return Levels(bounds, torch.tensor(values), float(least[POINTS]) * step)


class _FewBit(torch.autograd.Function):
    """The function in the forward, and a level of its derivative in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, bounds: Tensor, values: Tensor, bits: int) -> Tensor:
        codes = torch.bucketize(x.detach().flatten(), bounds.to(x.dtype)).to(torch.uint8)
        codes = F.pad(codes, (0, -len(codes) % 8)).view(-1, 8)
        places = torch.arange(8, dtype=torch.uint8, device=x.device)
        packed = [((codes >> bit & 1) << places).sum(1, dtype=torch.uint8) for bit in range(bits)]
        ctx.save_for_backward(*packed)
        ctx.values, ctx.shape = values, x.shape
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        places = torch.arange(8, dtype=torch.uint8, device=gradient.device)
        planes = [(packed[:, None] >> places & 1).flatten() for packed in ctx.saved_tensors]
        codes = sum(plane << bit for bit, plane in enumerate(planes))[: gradient.numel()]
        level = ctx.values.to(gradient.dtype)[codes.int()].view(ctx.shape)
        return gradient * level, None, None, None, None


class FewBit(nn.Module):
    """An activation whose backward reads bits of its input.

    Args:
        function: the activation, of elements.
        bits: 1 to 4.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], bits: int) -> None:
        super().__init__()
        self.function, self.bits = function, bits
        bounds, values, _ = best_levels(function, bits)
        self.register_buffer("bounds", bounds.float(), persistent=False)
        self.register_buffer("values", values.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x, of any shape."""
        result: Tensor = _FewBit.apply(x, self.function, self.bounds, self.values, self.bits)
        return result


def use_few_bits(model: nn.Module, bits: int) -> None:
    """Replace the activations of the MLPs of a Llama."""
    activation = FewBit(F.silu, bits)
    mlps: Iterator[Any] = (module for module in model.modules() if hasattr(module, "act_fn"))
    for mlp in mlps:
        mlp.act_fn = activation


def main() -> None:
    options = parser(__doc__, steps=60)
    options.add_argument("--bits", type=int, default=2, choices=range(5), help="of an input; 0: all of it")
    args = options.parse_args()
    model, blocks = small_llama(), read_text().train
    if args.bits:
        use_few_bits(model, args.bits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = {"stage": args.stage, "clip_grad_norm": 1.0, "micro_batch_size": 4}
    engine, _, batches, _ = zeroshard.initialize(
        model, optimizer, config, training_data=blocks, collate_fn=collator(model)
    )
    assert batches is not None  # there is training data
    for batch in chain.from_iterable(repeat(batches)):  # each iteration is an epoch
        step = engine.global_step
        if step >= args.steps:
            break
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if RANK == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    engine.close(restore=False)


if __name__ == "__main__":
    main()
