"""Config files: .json and .toml."""

import json
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise each ValueError inside with the name of the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"config file '{path}': {error}") from None


def world_size() -> int | None:
    """Return the number of ranks from WORLD_SIZE, which torchrun sets; None without it."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks.isdecimal() else None


def read_options(file: Path) -> Any:
    """Return the content of a .json or .toml file.

    Raises:
        ValueError: the file cannot be read or parsed, or has another ending.
    """
    parsers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads}
    if file.suffix.lower() not in parsers:
        raise ValueError("expected a name that ends in .json or .toml")
    try:
        return parsers[file.suffix.lower()](file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror}") from None
