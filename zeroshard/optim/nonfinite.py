"""What is said of gradients that are inf or nan."""

from __future__ import annotations

from torch import Tensor

from zeroshard.sharding.runtime import Runtime

_NUM_SHOWN = 3


def describe_nonfinite(runtime: Runtime, norm: Tensor) -> str:
    """The norm, and the first parameters that made it so on any rank; one exchange."""
    parameters = list(runtime.parameters)
    own = [p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters]
    answer = runtime.context.axis.any(own, "search for gradients that are not finite")
    names = [p.fqn for p, is_bad in zip(parameters, answer(), strict=True) if is_bad]
    shown = ", ".join(map(repr, names[:_NUM_SHOWN])) or "none: only the norm is too large"
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"the gradient norm is {norm.item()}; not finite are the gradients of {shown}{more}"
