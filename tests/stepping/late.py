"""Steps that wait on CPU ranks, too, and a count of the units that are stepped late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zeroshard.parameters.state import Moment, Phase
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.stepping import attach
from zeroshard.stepping.late import LateSteps


@contextmanager
def stepped_late() -> Iterator[list[str]]:
    """Give the names of units that are stepped in forwards, or before them in a batch of a pipeline."""
    names: list[str] = []
    take = LateSteps._step

    def counted(steps: LateSteps, unit: Unit) -> None:
        names.extend(
            [unit.name] * (steps._state.phase is Phase.FORWARD or Moment.BATCH in steps._state.moments)
        )
        take(steps, unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateSteps, "_step", counted)
        yield names


@contextmanager
def waiting(is_late: bool) -> Iterator[list[str]]:
    """Let steps wait on CPU ranks too, or at once; gives as `stepped_late`."""

    def may_wait(runtime: Runtime) -> bool:
        return is_late and not any(b.plan.is_resident and b.plan.gathers for b in runtime.buffers)

    with stepped_late() as names, pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "may_wait", may_wait)
        yield names
