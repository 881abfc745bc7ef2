"""Configs for callers that give each process data of its own, as trainers of other libraries do."""

from __future__ import annotations

from zeroshard.config.sections import Config, GivenConfig, Loader, refuse_pipeline

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


def parse_of_strategy(config: GivenConfig, library: str, accumulation: str) -> Config:
    """Return the config of a strategy, which leaves devices, DataLoaders and accumulation to a library.

    Args:
        config: see `parse_data_parallel`.
        library: the name of the library, for errors.
        accumulation: what to do there to accumulate gradients.

    Raises:
        ValueError: see `parse_data_parallel`; or the config has a setting of the library.
    """
    parsed, caller = parse_data_parallel(config, f"the strategy of {library}"), f"the strategy of {library}"
    steps, loaders = parsed.gradient_accumulation_steps, f"the DataLoaders are those of {library}"
    refuse(
        caller,
        ("device", parsed.device, None, f"set accelerator and devices of {library}"),
        ("gradient_accumulation_steps", steps, 1, accumulation),
        ("micro_batch_size", parsed.micro_batch_size, 1, f"{loaders}: set batch_size there"),
        ("loader", parsed.loader, Loader(), f"{loaders}: set num_workers and the like there"),
    )
    return parsed


def refuse(caller: str, *settings: tuple[str, object, object, str]) -> None:
    """Raise ValueError for the first setting that is not as it must be: name, value, expected one, remedy."""
    for name, came, wanted, remedy in settings:
        if came != wanted:
            raise ValueError(f"{caller}: {name}: expected {wanted!r}, got {came!r}; {remedy}")
