"""The random number generators of a rank."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import torch

from zeroshard.parallel.pipeline.profile import same_random_numbers


def capture(device: torch.device) -> dict[str, Any]:
    """The states of Python's, torch's and NumPy's default generators."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    kind, keys, *rest = cast(Any, numpy.random.get_state())
    states["numpy"] = [kind, keys.tolist(), *rest]
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Go on where `capture` was called; a generator whose state was not captured goes on as it is.

    Raises:
        Exception: of any kind, if they are no states of generators; then some generators may have them.
    """
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
    if "numpy" in states:
        kind, keys, position, has_gauss, gauss = states["numpy"]
        # NumPy reads its words at any position that it is given.
        if type(position) is not int or not 0 <= position <= len(keys) or has_gauss not in (0, 1):
            raise ValueError(f"expected a position among the words of NumPy's generator, got {position!r}")
        numpy.random.set_state((kind, keys, position, has_gauss, float(gauss)))


def check(states: dict[str, Any], device: torch.device) -> None:
    """Raise an error of any kind unless they are states of generators, which go on as they are."""
    with same_random_numbers(device):
        restore(states, device)


def derive(seed: int, rank: int, step: int) -> None:
    """Seed the generators of a rank for which no state was saved: the same for the same arguments."""
    value = random.Random(f"{seed} {rank} {step}").getrandbits(63)
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value % 2**32)
