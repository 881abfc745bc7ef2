"""A line of JSON for each report, in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from zeroshard.logs.targets import RunFacts


class JsonLines:
    """Appends to a file, a line for each report, which other programs can read at once.

    JSON has no infinity: a value that is not finite becomes the text "nan", "inf" or "-inf". A run that goes
    on appends to its file. If it repeats steps, the last value of a step counts.

    Args:
        file: the file; its folder is made if needed.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("a", encoding="utf-8", buffering=1)  # each line is written at once

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line."""
        plain = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_target(place: str, run: RunFacts) -> JsonLines:
    """Return the target that appends to the file `place`."""
    return JsonLines(Path(place))
