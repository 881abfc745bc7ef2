"""A count of the units that are stepped late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zeroshard.parameters.state import Moment, Phase
from zeroshard.sharding.unit import Unit
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
