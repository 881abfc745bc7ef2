"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zeroshard.sharding.norms import sum_of_squares
from zeroshard.sharding.runtime import Runtime

_EPSILON = 1e-6
"""Of torch.nn.utils.clip_grad_norm_, so that factors agree."""


def clip_grad_norm_(runtime: Runtime, max_norm: float) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)).

    Returns:
        The 2-norm of all gradients before that, over the parameters of the whole model: 0-dim, float32.
    """
    norm = global_norm(runtime)
    limit_norm(runtime, norm, max_norm)
    return norm


def limit_norm(runtime: Runtime, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, whose norm is known, by min(1, max_norm / (norm + 1e-6))."""
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0).view(1)  # 0-dim, it would become a bfloat16
    grads = [p.grad for buffer in runtime.buffers for p in buffer.sharded if p.grad is not None]
    for grad in grads:
        grad.mul_(factor)


@torch.no_grad()
def global_norm(runtime: Runtime) -> Tensor:
    """The 2-norm over all gradients, each element counted once; one exchange of a number.

    Every rank adds up the squares of the elements that the layout gives it, at every stage alike, in
    float64; so the norm does not depend on the stage.
    """
    axis = runtime.context.axis
    total = torch.zeros((), dtype=torch.float64, device=runtime.context.device)
    if own := list(own_gradients(runtime)):
        total += sum_of_squares(own).sum()
    return axis.sum(total, "sum of the squared gradient norms").sqrt().float()


def own_gradients(runtime: Runtime) -> Iterator[Tensor]:
    """The parts of the gradients that the layout gives to this rank: over all ranks, each element once."""
    for buffer in runtime.buffers:
        for index, parameter in enumerate(buffer.sharded):
            if (grad := parameter.grad) is not None:
                yield grad[buffer.counted(index)]
