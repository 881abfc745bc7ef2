"""Tracers around a forward of a sharded model: refused, as they would record parameters that come and go."""

from __future__ import annotations

from typing import NoReturn

from zeroshard.internals.autograd import tracer_around
from zeroshard.lazy.recording import refuse_recording


def refuse_tracers() -> None:
    """Refuse a forward whose operations are recorded, or not computed.

    Raises:
        RuntimeError: the name of the tracer.
    """
    refuse_recording("a forward of a sharded model")
    if (tracer := tracer_around()) is not None:
        _refuse(tracer)


def refuse_proxies() -> NoReturn:
    """Refuse arguments that are proxies of torch.fx.

    Raises:
        RuntimeError: always.
    """
    _refuse("torch.fx.symbolic_trace")


def _refuse(tracer: str) -> NoReturn:
    raise RuntimeError(
        f"a sharded model cannot be recorded by {tracer}: its full parameters are in the modules during "
        "a forward only. Trace the model before zeroshard.initialize, or a second model that has loaded "
        "engine.full_state_dict(); for shapes alone, build a second model under torch.device('meta')"
    )
