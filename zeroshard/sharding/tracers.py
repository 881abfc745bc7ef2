"""Tracers around a forward: where they may record it, and what is told where not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from zeroshard.sharding.autograd import tracer_around
from zeroshard.sharding.recorder import refuse_recording
from zeroshard.sharding.unit import Unit

_REMEDY = (
    "Trace the model before zeroshard.initialize, or a second model that has loaded "
    "engine.full_state_dict(); for shapes alone, build a second model under torch.device('meta')"
)


def is_traced(units: Sequence[Unit]) -> bool:
    """Whether something records the operations of a forward that begins now.

    Raises:
        RuntimeError: the record would hold parameters whose memory is freed after the forward, or that
            torch.jit.trace does not find in the module.
    """
    refuse_recording("a forward of a sharded model")
    tracer = tracer_around()
    if tracer is None:
        return False
    freed = next((unit for unit in units if not unit.is_resident), None)
    if freed is not None:
        reason = f"the parameters of {freed.described} are freed after its forward"
    elif tracer == "torch.jit.trace":
        reason = "the full parameters are not in the module between steps"
    else:
        return True
    raise RuntimeError(f"a sharded model cannot be recorded by {tracer}: {reason}. {_REMEDY}")


def refuse_proxies() -> NoReturn:
    """Refuse arguments that are proxies of torch.fx.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "a sharded model cannot be recorded by torch.fx.symbolic_trace: its hooks gather parameters for each "
        f"forward. {_REMEDY}"
    )
