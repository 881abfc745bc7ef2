"""A DeepSpeed config, as a dict or a file, becomes a Config."""

import os
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from zeroshard.config.files import naming, read_options, world_size
from zeroshard.config.sections import Config
from zeroshard.deepspeed.translate import is_known, translate

__all__ = ["is_known", "read"]

_Config = TypeVar("_Config", bound=Config)


def read(kind: type[_Config], config: Mapping[str, Any] | str | os.PathLike[str]) -> _Config:
    """Return the Config for `Config.from_deepspeed`, and warn of sections that it cannot hold.

    Args:
        kind: the class to build.
        config: a mapping of DeepSpeed's keys and sections, or the path of such a file.

    Raises:
        ValueError: listing all keys that are unknown, wrong, "auto", or have no equivalent.
    """
    path = config if isinstance(config, str | os.PathLike) else None
    with nullcontext() if path is None else naming(path):
        given: Any = config if path is None else read_options(Path(path))
        options, note = translate(given, world_size())
        translated = kind.from_dict(options)
    if note:
        warnings.warn(note, stacklevel=3)
    return translated
