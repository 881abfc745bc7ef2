"""Configs for callers that give each process data of its own, as trainers of other libraries do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zeroshard.config.sections import Config, Loader, refuse_pipeline


def parse_data_parallel(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None, library: str
) -> Config:
    """Return a config whose ranks are all data-parallel, and whose batches come from the caller.

    Args:
        config: a Config, a dict, or a path to a .json or .toml file.
        library: the name of the caller's library, for errors.

    Raises:
        ValueError: the config is not as expected, asks for pipeline or tensor ranks, or has settings of a
            DataLoader.
    """
    parsed = Config.parse(config)
    refuse_pipeline(parsed, f"the strategy of {library}")
    if parsed.mesh.tp > 1:
        raise ValueError(
            f"mesh.tp: {library} gives each process other data, but tensor-parallel ranks need the same "
            "batch: expected mesh.tp=1 with the strategy, or a training loop of your own"
        )
    if parsed.micro_batch_size != 1 or parsed.loader != Loader():
        raise ValueError(
            f"micro_batch_size, loader: expected the defaults, since the DataLoaders are those of {library}: "
            "set batch_size and the like there"
        )
    return parsed
