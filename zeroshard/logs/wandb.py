"""A run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroshard.logs.targets import RunFacts


class WeightsAndBiases:
    """Sends metrics to a new run of Weights & Biases.

    The package's own environment variables hold: `WANDB_MODE=offline` keeps all in a folder, `WANDB_DIR`
    names it, `WANDB_RUN_ID` with `WANDB_RESUME` goes on with a run.

    Args:
        project: the name of the project.
        run: the run, for its config.
    """

    def __init__(self, project: str, run: RunFacts) -> None:
        import wandb

        self._run: Any = wandb.init(project=project, config=dict(run.config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values; Weights & Biases takes none for a step before its last one."""
        self._run.log({f"train/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """End the run, and wait until all is written or sent."""
        self._run.finish()


def open_target(place: str, run: RunFacts) -> WeightsAndBiases:
    """Return the target in the project `place`."""
    return WeightsAndBiases(place, run)
