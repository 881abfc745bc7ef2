"""Scalars for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zeroshard.logs.targets import RunFacts


class TensorBoard:
    """Writes event files into a folder; `tensorboard --logdir FOLDER` shows them.

    Args:
        folder: the folder; it is made if needed.
        run: the run. Of a run that goes on, TensorBoard hides earlier points that are written again.
    """

    def __init__(self, folder: str, run: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = run.first_step + 1 if run.first_step else None
        self._writer: Any = SummaryWriter(folder, purge_step=purge)
        text = json.dumps(dict(run.config), indent=2, default=str)
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # a block of code in Markdown
        self._writer.add_text("config", indented, run.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def open_target(place: str, run: RunFacts) -> TensorBoard:
    """Return the target that writes into the folder `place`."""
    return TensorBoard(place, run)
