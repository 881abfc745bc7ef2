"""The global gradient norm, and clipping by it: a few kernels for the gradients of each device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm import moves
from zeroshard.parameters.sharded import gradient_of
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.norms import sum_of_powers

_EPSILON = 1e-6
"""The constant of torch.nn.utils.clip_grad_norm_, so that factors agree."""


@torch.no_grad()
def limit_norm(runtime: Runtime, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)).

    Args:
        runtime: the runtime whose `p.grad` are scaled in place.
        norm: 0-dim, float32: the global norm of these gradients.
        max_norm: the limit.
    """
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    for gradients in (gradients for unit in runtime.units for gradients in unit.gradients):
        gradients.noted = None  # of the values before
    found = [(p, gradient) for p in runtime.parameters if (gradient := gradient_of(p)) is not None]
    scale_([gradient for _, gradient in found if moves.is_beside(gradient, factor)], factor)
    far = [(p, gradient) for p, gradient in found if not moves.is_beside(gradient, factor)]
    if far and not runtime.state.steps.scale_later(far, factor):
        runtime.state.steps.before_look()
        scale_([gradient for _, gradient in far], factor)


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place; a product is rounded once, to the dtype of its tensor.

    Args:
        tensors: tensors of any floating-point dtypes, on any devices.
        factor: 0-dim, float32; if tensors lie on another device, the host waits for it.
    """
    for group in by_device(tensors):
        own = moves.beside(factor, group[0])
        if own.is_cpu and own is not factor and own.item() == 1.0:
            continue  # host memory is slow
        if alike := [tensor for tensor in group if tensor.dtype == own.dtype]:
            torch._foreach_mul_(alike, own)
        for tensor in group:
            if tensor.dtype != own.dtype:
                tensor.mul_(own.view(1))  # a 0-dim factor would be rounded to the dtype of the tensor first


@torch.no_grad()
def global_norm(runtime: Runtime, order: float = 2.0) -> Tensor:
    """The norm over all gradients, each element counted once; one exchange of a number.

    Every rank adds up the powers of the elements that the layout gives it, at every stage alike, in float64.
    So the norm of the same gradients does not depend on the stage: to the bit on CPU ranks, which add up each
    parameter by itself; on accelerators as `norms.foreach_sum_of_squares` says.

    Args:
        order: the order of the norm, above 0; inf gives the largest magnitude.

    Returns:
        0-dim, float32.
    """
    axes, device = runtime.context.axes, runtime.context.device
    runtime.state.steps.scale_gradients()
    own = own_gradients(runtime, order)
    if math.isinf(order):
        found = [moves.to_device(g.abs().max().double(), device) for g in own if g.numel()]
        largest = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *found]).max()
        for axis in (axes.dp_shard, axes.tp, axes.pp):
            everyone = torch.zeros(axis.size, dtype=torch.float64, device=device)
            everyone[axis.rank] = largest
            largest = axis.sum(everyone, "largest gradients")().max()
        return largest.float()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group in by_device(own):
        total += moves.to_device(sum_of_powers(group, order).sum(), device)
    for axis in (axes.dp_shard, axes.tp, axes.pp):
        total = axis.sum(total, f"sum of the gradient norms to the power of {order:g}")()
    return (total.sqrt() if order == 2.0 else total.pow(1.0 / order)).float()


def by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors in groups of one device: main parameters and their gradients may lie on the host."""
    return [[tensors[index] for index in group] for group in moves.by_device(tensors)]


def own_gradients(runtime: Runtime, order: float = 2.0) -> list[Tensor]:
    """Find the gradients that this rank counts: over all ranks, each element once.

    For the norm of order 2, gradients on the host whose squares the device has added up are one number with
    their norm.
    """
    notes = {
        gradients.buffer: squares.sqrt().view(1)
        for unit in runtime.units
        for gradients in unit.gradients
        if order == 2.0 and (squares := gradients.noted_squares()) is not None
    }
    if any(
        not one.store.is_near and one.buffer not in notes for unit in runtime.units for one in unit.gradients
    ):
        runtime.state.steps.before_look()  # the host reads gradients that may be on their way
    tensors = [
        gradient[buffer.counted(index)]
        for buffer in runtime.buffers
        if buffer not in notes
        for index, parameter in enumerate(buffer.sharded)
        if (gradient := gradient_of(parameter)) is not None
    ]
    return [*tensors, *notes.values()]
