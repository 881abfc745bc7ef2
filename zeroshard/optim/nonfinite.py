"""Gradients that are inf or nan: whether there are any, and what is said of them."""

from __future__ import annotations

import torch

from zeroshard.optim.clipping import global_norm, own_gradients
from zeroshard.sharding.runtime import Runtime

_NUM_SHOWN = 3


@torch.no_grad()
def all_finite(runtime: Runtime) -> bool:
    """Whether no gradient holds inf or nan on any rank; one exchange.

    A sum passes them on at a fifteenth of the time of a norm. One that overflows by itself counts as well.
    """
    sums = [own.sum().double() for own in own_gradients(runtime)]
    is_bad = bool(sums) and not bool(torch.stack(sums).sum().isfinite())
    return not runtime.context.axes.dp.any([is_bad], "agreement on whether gradients are finite")()[0]


def describe_nonfinite(runtime: Runtime) -> str:
    """The norm, and the first parameters that made it so on any rank."""
    parameters = list(runtime.parameters)
    own = [p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters]
    answer = runtime.context.axes.dp.any(own, "search for gradients that are not finite")
    names = [p.fqn for p, is_bad in zip(parameters, answer(), strict=True) if is_bad]
    shown = ", ".join(map(repr, names[:_NUM_SHOWN])) or "none: they are too large to be added up"
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    norm = global_norm(runtime).item()
    return f"the gradient norm is {norm}; not finite are the gradients of {shown}{more}"
