"""A line on the terminal for each report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.text import Text

from zeroshard.logs.targets import RunFacts
from zeroshard.tables import format_bytes

_FIGURES: Mapping[str, Callable[[float], str]] = {
    "seconds": lambda value: "",
    "loss": lambda value: f"loss {value:.4f}",
    "grad_norm": lambda value: f"norm {value:.3g}",
    "lr": lambda value: f"lr {value:.2e}",
    "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    "memory_bytes": format_bytes,
    "skipped_steps": lambda value: f"{value:.0f} skipped" if value else "",
    "loss_scale": lambda value: f"scale {value:g}" if value != 1 else "",
}
"""The text of each metric; "" leaves it out."""


class Terminal:
    """Prints each report as one line.

    Args:
        run: the run, for the number of its steps.
        console: where to print.
    """

    def __init__(self, run: RunFacts, console: Console) -> None:
        self._num_steps, self._console = run.num_steps, console
        self._num_skipped = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print a line. Steps that were skipped since the last one are yellow, and a wrong loss is red."""
        of = "" if self._num_steps is None else f"/{self._num_steps}"
        line = Text.assemble((f"step {step}{of}", "bold"))
        for name, value in values.items():
            text = _FIGURES[name](value) if name in _FIGURES else f"{name} {value:.4g}"
            if text:
                line.append("  ").append(text, style=self._style(name, value))
        self._num_skipped = values.get("skipped_steps", self._num_skipped)
        self._console.print(line, soft_wrap=True)

    def _style(self, name: str, value: float) -> str:
        if name == "skipped_steps" and value > self._num_skipped:
            return "yellow"
        return "red" if name == "loss" and not math.isfinite(value) else ""

    def close(self) -> None:
        """Do nothing: each line is there."""


def open_target(place: str, run: RunFacts) -> Terminal:
    """Return the target; it has no place."""
    return Terminal(run, Console(highlight=False))
