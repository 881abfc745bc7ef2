"""Gradients that are inf or nan: a check for them, and the message about them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.internals.foreach import foreach_norm
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.clipping import by_device, global_norm, own_gradients

_NUM_SHOWN = 3


@torch.no_grad()
def all_finite(runtime: Runtime) -> bool:
    """True if no gradient holds inf or nan on any rank; one exchange."""
    own = own_gradients(runtime)
    probes = [_probe(group) for group in by_device(own.tensors)]
    probes += [torch.stack(own.squares)] if own.squares else []
    is_bad = not all(bool(probe.isfinite().all()) for probe in probes)
    return not runtime.context.axes.world.any([is_bad], "agreement on whether gradients are finite")()[0]


def _probe(tensors: Sequence[Tensor]) -> Tensor:
    """Values that are all finite if and only if each element of tensors on one device is."""
    return (summed if tensors[0].is_cpu else largest)(tensors)


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """0-dim, float64: not finite if an element is not, or if the sum of a tensor overflows.

    A CPU takes a fifteenth of the time of a norm.
    """
    return torch.stack([tensor.sum().double() for tensor in tensors]).sum()


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """[n]: the largest magnitude of each tensor; inf or nan if and only if an element is.

    An accelerator takes as long as for a sum, with a few kernels for all tensors of a dtype.
    """
    return torch.stack(foreach_norm(tensors, math.inf))


def describe_nonfinite(runtime: Runtime, order: float = 2.0) -> str:
    """The message, the same on all ranks: the norm, and the first parameters with such gradients."""
    parameters = list(runtime.parameters)
    own = [p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters]
    axes, label = runtime.context.axes, "search for gradients that are not finite"
    answer = axes.everyone.any(own, label)()  # pipeline ranks hold other parameters
    found = [p.fqn for p, is_bad in zip(parameters, answer, strict=True) if is_bad]
    names = list(dict.fromkeys(name for part in axes.pp.all_gather_object(found, label) for name in part))
    shown = ", ".join(map(repr, names[:_NUM_SHOWN])) or "none: they are too large to be added up"
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    norm = global_norm(runtime, order).item()
    return f"the gradient norm is {norm}; not finite are the gradients of {shown}{more}"
