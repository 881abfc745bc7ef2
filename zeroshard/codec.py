"""Records become JSON; values of a file, which may say anything, become records, by annotations.

    annotation                      takes
    int, float, str, bool, Any      a value of this type; any value
    torch.dtype                     its name
    Annotated[int, accept]          an integer for which `accept` returns True
    X | None                        None, or what X takes
    list[X], tuple[X, ...]          a list
    dict[K, X]                      a dict
    a dataclass                     a dict with its fields alone; it may lack those that have a default

So a file with an entry of a later version is refused. All that a file may lack is a kind of `Damage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch

MAX_STEPS = 1 << 53
"""Float64 can't count further."""
_hints = cache(partial(get_type_hints, include_extras=True))
Count = Annotated[int, range(MAX_STEPS).__contains__]
Size = Annotated[int, range(1 << 63).__contains__]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that users write: float32."""
    return str(dtype).removeprefix("torch.")


def to_json(value: Any) -> Any:
    """Return what JSON has for a record or a dtype: the `default` of `json.dumps`."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


class DamageError(RuntimeError):
    """A file is not as it was written."""


_AGAIN = "Load an older tag, or copy the file anew"


class Damage(StrEnum):
    """The kinds of damage, each with its one text: what was expected and found, and the remedy."""

    MISSING = f"expected a file, found none. {_AGAIN}"
    LINK = "expected the file itself, found a symbolic link to '{}'. Only its directory may be a link"
    SIZE = f"expected {{}} bytes, found {{}}. {_AGAIN}"
    SUM = f"expected the checksum {{!s:.20}}, found {{}}. {_AGAIN}"
    CONTENT = f"expected content in its format, found {{:.300}}. {_AGAIN}"
    FORMAT = "expected format {}, found {!r:.20}. Load it with what wrote it, {!s:.100}"

    def of(self, file: Path, *found: object) -> DamageError:
        """Return the error of a file, with the values that its text has places for."""
        return DamageError(f"{file}: {self.format(*found)}")


@contextmanager
def naming_damage(file: Path, remedy: str = "") -> Iterator[None]:
    """Raise each error inside, of whatever kind a crafted file makes it, as the damage of the file.

    Args:
        file: the file.
        remedy: if given, a ValueError is no damage: it says what the engine lacks, and gets file and remedy.
    """
    try:
        yield
    except (DamageError, IsADirectoryError, PermissionError):  # of a file that it names
        raise
    except FileNotFoundError:
        raise Damage.MISSING.of(file) from None
    except Exception as error:
        if remedy and isinstance(error, ValueError):
            raise ValueError(f"{file}: {error}. {remedy}") from None
        raise Damage.CONTENT.of(file, f"{type(error).__name__}: {error}") from None


def typed(kind: Any, value: Any, name: str) -> Any:
    """Return a value as one of an annotated type.

    Args:
        kind: the annotation, as in the table above.
        value: the value, not changed.
        name: of the value, for the error.

    Raises:
        ValueError, TypeError: it is none of that type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or type(value) is kind:
        return value
    if origin is Annotated:
        made = typed(args[0], value, name)
        if args[1](made):
            return made
    elif origin in (UnionType, Union):
        return None if value is None else typed(args[0], value, name)
    elif origin is dict and isinstance(value, dict):
        return {typed(args[0], key, name): typed(args[1], value[key], f"{name}.{key}") for key in value}
    elif origin in (list, tuple) and isinstance(value, list):
        return origin(typed(args[0], item, name) for item in value)
    elif kind is torch.dtype and isinstance(made := getattr(torch, str(value), None), torch.dtype):
        return made
    elif hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        known = _hints(kind)
        made = {key: typed(known.get(key), value[key], f"{name}.{key}") for key in value}
        try:
            return kind(**made)
        except (TypeError, ValueError) as error:  # fields are missing, or do not fit each other
            raise ValueError(f"the entry '{name:.100}': {error}") from None
    raise ValueError(f"the entry '{name:.100}' is unknown, or has a wrong type or value")
