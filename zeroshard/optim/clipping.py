"""The global gradient norm, and clipping by it.

The gradients of a flat buffer are views of one tensor, unless the user replaced them or one rank is alone. So
operators work on the runs of memory that the gradients form: a few kernels per buffer, however many
parameters it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.sharding.norms import sum_of_squares
from zeroshard.sharding.runs import contiguous_runs
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


@torch.no_grad()
def limit_norm(runtime: Runtime, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, whose norm is known, by min(1, max_norm / (norm + 1e-6))."""
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    with torch._C.DisableTorchFunctionSubclass():  # its guards take longer than the rest
        grads = [p.grad for buffer in runtime.buffers for p in buffer.sharded if p.grad is not None]
    scale_(grads, factor)


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place; a product is rounded once, to the dtype of its tensor.

    Args:
        tensors: of any floating-point dtypes, on one device.
        factor: 0-dim, float32.
    """
    runs = contiguous_runs(tensors)
    if alike := [run for run in runs if run.dtype == factor.dtype]:
        torch._foreach_mul_(alike, factor)
    for run in runs:
        if run.dtype != factor.dtype:
            run.mul_(factor.view(1))  # 0-dim, it would become a bfloat16 before it is multiplied by one


@torch.no_grad()
def global_norm(runtime: Runtime) -> Tensor:
    """The 2-norm over all gradients, each element counted once; one exchange of a number.

    Every rank adds up the squares of the elements that the layout gives it, at every stage alike, in float64.
    So the norm does not depend on the stage: to the bit on CPU ranks, which add up each parameter by itself;
    on accelerators as `norms.foreach_sum_of_squares` tells.
    """
    axis = runtime.context.axis
    total = torch.zeros((), dtype=torch.float64, device=runtime.context.device)
    if own := own_gradients(runtime):
        total += sum_of_squares(own).sum()
    return axis.sum(total, "sum of the squared gradient norms").sqrt().float()


def own_gradients(runtime: Runtime) -> list[Tensor]:
    """The parts of the gradients that the layout gives to this rank: over all ranks, each element once.

    On a CPU one tensor per parameter, as the bits of their sums depend on it; on accelerators, runs of them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        own = [
            parameter.grad[buffer.counted(index)]
            for buffer in runtime.buffers
            for index, parameter in enumerate(buffer.sharded)
            if parameter.grad is not None
        ]
    return own if runtime.context.device.type == "cpu" else contiguous_runs(own)
