"""Configs for callers that give each process data of its own, as trainers of other libraries do."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from zeroshard.config.checked import show
from zeroshard.config.sections import Config, GivenConfig, refuse_pipeline

TAG = "zeroshard"
"""The tag of the engine's checkpoint in the folder that a library knows as one checkpoint."""


def parse_data_parallel(config: GivenConfig, caller: str, decided: Mapping[str, str]) -> Config:
    """Return a config whose ranks are all data-parallel.

    Args:
        config: a Config, a dict, or a path to a .json or .toml file.
        caller: the name of the caller, for errors.
        decided: the keys of which the caller decides, each with the place of the setting there.

    Raises:
        ValueError: the config is not as expected, asks for pipeline or tensor ranks, or has a key of which
            the caller decides.
    """
    parsed = Config.parse(config)
    refuse_pipeline(parsed, caller)
    if parsed.mesh.tp > 1:
        raise ValueError(
            f"mesh.tp: {caller} gives each process other data, but tensor-parallel ranks need the same "
            "batch: expected mesh.tp=1 with it, or a training loop of your own"
        )
    default = Config()
    keys = ((key, attrgetter(key)(parsed), attrgetter(key)(default), place) for key, place in decided.items())
    refuse(caller, *((key, came, wanted, f"set {place}") for key, came, wanted, place in keys))
    return parsed


def refuse(caller: str, *settings: tuple[str, object, object, str]) -> None:
    """Raise ValueError for all settings that are not as they must be: name, value, expected one, remedy."""
    wrong = [
        f"{name}: expected {show(wanted)}, got {show(came)}; {remedy}"
        for name, came, wanted, remedy in settings
        if came != wanted
    ]
    if wrong:
        raise ValueError(f"{caller}: {'. '.join(wrong)}")
