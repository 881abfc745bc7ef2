"""Tracers and transforms around a forward of a sharded model: refused.

A tracer would record parameters that come and go. Inside a transform of torch.func the hooks on outputs,
which gather parameters in the backward, would run as a part of the transform.
"""

from __future__ import annotations

from zeroshard.internals.autograd import is_transformed, tracer_around
from zeroshard.lazy.recording import refuse_recording


def refuse_tracers(args: object = ()) -> None:
    """Refuse a forward whose operations are recorded, or not computed.

    Args:
        args: its arguments; torch.fx gives a proxy in the place of the tuple.

    Raises:
        RuntimeError: the name of the tracer.
    """
    refuse_recording("a forward of a sharded model")
    tracer = tracer_around() if isinstance(args, tuple) else "torch.fx.symbolic_trace"
    if tracer is not None:
        raise RuntimeError(
            f"a sharded model cannot be recorded by {tracer}: its full parameters are in the modules during "
            "a forward only. Trace the model before zeroshard.initialize, or a second model that has loaded "
            "engine.full_state_dict(); for shapes alone, build a second model under torch.device('meta')"
        )


def refuse_transforms() -> None:
    """Refuse a forward inside a transform of torch.func.

    Raises:
        RuntimeError: there is one.
    """
    if is_transformed():
        raise RuntimeError(
            "a sharded model cannot be called inside a transform of torch.func (grad, vjp, jvp, vmap, "
            "...), where its parameters cannot be gathered for the backward: transform a second model that "
            "has loaded engine.full_state_dict(). Gradients of gradients need no transform: "
            "torch.autograd.grad(outputs, inputs, create_graph=True)"
        )
