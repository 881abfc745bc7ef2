"""The targets of a log: the small interface that all of them have, their names, and each of them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from zeroshard.tables import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

_MOST_PARAMS, _LONGEST_VALUE = 100, 500
"""The parameters of one call, and the characters of a value; MLflow's servers refuse more (its REST API)."""
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


@runtime_checkable
class Target(Protocol):
    """A place that metrics are sent to. Rank 0 alone has one."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take values by name; several calls may have the same step, with other names.

        Args:
            step: steps so far: those that the optimizer has taken, and those that were skipped.
            values: the metrics of `StepMetrics` that there are, or values of the user's.
        """

    def close(self) -> None:
        """Write what is still in buffers; nothing follows."""


class RunFacts(NamedTuple):
    """Facts about a run that a target may keep."""

    config: Mapping[str, Any]
    """The config of zeroshard, and values of the user's, as plain values."""
    first_step: int
    """Steps that were taken before this log: above 0 for a run that goes on."""
    num_steps: int | None
    """Steps of the whole run, if it is known."""


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
        from rich.text import Text

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


def _open_terminal(place: str, run: RunFacts) -> Terminal:
    from rich.console import Console

    return Terminal(run, Console(highlight=False))


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


class MLflow:
    """Sends metrics to a new run of MLflow, through a client of its own: the active run stays the user's.

    The experiment is that of `MLFLOW_EXPERIMENT_NAME`, or "zeroshard".

    Args:
        uri: the tracking URI, such as sqlite:///mlflow.db or the address of a server; "" for MLflow's own
            choice (`MLFLOW_TRACKING_URI`). MLflow 3.17 takes file:./mlruns only with
            MLFLOW_ALLOW_FILE_STORE=true.
        run: the run; its config becomes parameters.
    """

    def __init__(self, uri: str, run: RunFacts) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri or None)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "zeroshard")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run_id: str = self._client.create_run(number).info.run_id
        self._send_params(flat(run.config))

    def _send_params(self, values: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in values.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values in one call."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        sent = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=sent)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


Opener = Callable[[RunFacts], Target]
"""Opens a target; called on rank 0 alone."""


class TargetKind(NamedTuple):
    """A kind of target that a word names."""

    open: Callable[[str, RunFacts], Target]
    """Opens a target from the text after the colon."""
    place: str
    """The meaning of this text, for messages."""
    default: str | None
    """The text if none is given; None: one is required."""
    package: str | None
    """The package that it needs beside zeroshard's own requirements."""


KINDS: Mapping[str, TargetKind] = {
    "terminal": TargetKind(_open_terminal, "", "", None),
    "jsonl": TargetKind(lambda file, _: JsonLines(Path(file)), "FILE", None, None),
    "tensorboard": TargetKind(TensorBoard, "FOLDER", "runs", "tensorboard"),
    "wandb": TargetKind(WeightsAndBiases, "PROJECT", "zeroshard", "wandb"),
    "mlflow": TargetKind(MLflow, "URI", "", "mlflow"),
}
"""The targets by name."""


def parse_target(text: str) -> Opener:
    """Return the function that opens the target of a text such as "jsonl:metrics.jsonl".

    Raises:
        ValueError: no target has this name, or it needs a place that is not given.
        ImportError: its package is not installed.
    """
    name, _, place = text.partition(":")
    known = ", ".join(f"{name}:{kind.place}" if kind.place else name for name, kind in KINDS.items())
    if name not in KINDS:
        raise ValueError(f"log target: expected one of {known}, got {text!r}")
    kind = KINDS[name]
    place = place or kind.default or ""
    if kind.default is None and not place:
        raise ValueError(f"log target: expected {name}:{kind.place}, got {text!r}")
    if place and not kind.place:
        raise ValueError(f"log target: expected {name} without a place, got {text!r}")
    if kind.package is not None and find_spec(kind.package) is None:
        raise ImportError(
            f"log target {name!r}: expected the package {kind.package}: pip install {kind.package}"
        )
    return lambda run: kind.open(place, run)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
