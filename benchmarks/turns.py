"""The sides of a comparison: their command line, their turns, and a check of what they compute."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Side = TypeVar("Side", bound=Hashable)
HELP = {
    "ranks": "processes that train together",
    "batch": "sequences per rank",
    "rounds": "timed turns of each side",
    "warmup": "rounds before the timed ones",
    "lead_in": "untimed steps in each turn, before the timed one",
    "threads": "of each rank",
}


def command_line(text: str | None, *, name: str | None = None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with an option for each number, and --name.

    Args:
        text: the docstring of the script; its first line is shown.
        name: the document, if it has the same name for all options.
        numbers: defaults of the options, by their names.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--name", default=name, help="of the JSON file in benchmarks/results")
    for key, default in numbers.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, default=default, help=HELP.get(key))
    return parser


def in_turns(
    sides: Mapping[Side, Callable[[], float]], num_rounds: int, warmup: int = 0
) -> dict[Side, list[float]]:
    """Let each side have its turn in each round, in an order that is shuffled, the same on all ranks.

    Args:
        sides: functions that take a turn and return its seconds.
        num_rounds: the rounds that count.
        warmup: rounds before them.
    """
    order, found = random.Random(0), {name: list[float]() for name in sides}
    for number in range(warmup + num_rounds):
        for name in order.sample(list(sides), len(sides)):
            seconds = sides[name]()
            if number >= warmup:
                found[name].append(seconds)
    return found


def seconds_of(call: Callable[[], object]) -> float:
    """The time of a call, to the end of its work on the device, which has nothing to do before it."""
    start = time.perf_counter()
    call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def check_near(what: str, got: Tensor, want: Tensor, farthest: float) -> None:
    """Compare first steps, so that nobody is timed on wrong work.

    Raises:
        RuntimeError: the distance, relative to the norm of `want`, is above `farthest`.
    """
    distance = ((got - want).norm() / want.norm()).item()
    if not distance <= farthest:
        raise RuntimeError(f"Expected {what} within {farthest}, got {distance:.4f}")
