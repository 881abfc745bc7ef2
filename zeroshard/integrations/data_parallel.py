"""Configs for callers that give each process data of its own, as trainers of other libraries do."""

from __future__ import annotations

from zeroshard.config.sections import Config, GivenConfig, refuse_pipeline

TAG = "zeroshard"
"""The tag of the engine's checkpoint in the folder that a library knows as one checkpoint."""


def parse_data_parallel(config: GivenConfig, caller: str) -> Config:
    """Return a config whose ranks are all data-parallel.

    Args:
        config: a Config, a dict, or a path to a .json or .toml file.
        caller: the name of the caller, for errors.

    Raises:
        ValueError: the config is not as expected, or asks for pipeline or tensor ranks.
    """
    parsed = Config.parse(config)
    refuse_pipeline(parsed, caller)
    if parsed.mesh.tp > 1:
        raise ValueError(
            f"mesh.tp: {caller} gives each process other data, but tensor-parallel ranks need the same "
            "batch: expected mesh.tp=1 with it, or a training loop of your own"
        )
    return parsed
