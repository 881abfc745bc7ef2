"""Values of a file, which may say anything, become typed ones, by annotations.

    annotation                      takes
    int, float, str, bool, Any      a value of this type; any value
    Annotated[int, accept]          an integer for which `accept` returns True
    X | None                        None, or what X takes
    list[X], tuple[X, ...]          a list
    dict[K, X]                      a dict
    a dataclass                     a dict with its fields alone; it may lack those that have a default

So a file with an entry of a later version is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

MAX_STEPS = 1 << 53
"""Float64 can't count further."""
Count = Annotated[int, range(MAX_STEPS).__contains__]


@contextmanager
def naming_damage(file: Path) -> Iterator[None]:
    """Raise each error inside, of whatever kind a crafted file makes it, as a RuntimeError with the file."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{file}: damaged ({type(error).__name__}: {error!s:.300})") from None


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
    elif hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        known = _hints(kind)
        return kind(**{key: typed(known.get(key), value[key], f"{name}.{key}") for key in value})
    raise ValueError(f"the entry '{name:.100}' is unknown, or has a wrong type or value")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
