"""The targets of a log: the small interface that all of them have, and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, runtime_checkable


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


class TargetKind(NamedTuple):
    """A kind of target that a word names."""

    place: str
    """The meaning of the text after the colon, for messages."""
    default: str | None
    """The place if none is given; None: one is required."""
    package: str | None
    """The package that it needs beside zeroshard's own requirements."""


KINDS: Mapping[str, TargetKind] = {
    "terminal": TargetKind("", "", None),
    "jsonl": TargetKind("FILE", None, None),
    "tensorboard": TargetKind("FOLDER", "runs", "tensorboard"),
    "wandb": TargetKind("PROJECT", "zeroshard", "wandb"),
    "mlflow": TargetKind("URI", "", "mlflow"),
}
"""The targets by name. The module of the same name in this folder has a function `open_target`."""

Opener = Callable[[RunFacts], Target]
"""Opens a target; called on rank 0 alone."""


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
    module = import_module(f"zeroshard.logs.{name}")

    def open_target(run: RunFacts) -> Target:
        target: Target = module.open_target(place, run)
        return target

    return open_target


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
