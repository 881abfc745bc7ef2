"""Records become JSON; values of a file, which may say anything, become records, by annotations.

    annotation                      takes
    int, float, str, bool, Any      a value of this type; any value
    torch.dtype                     its name
    Annotated[int, accept]          an integer for which `accept` returns True
    X | None                        None, or what X takes
    list[X], tuple[X, ...]          a list
    dict[K, X]                      a dict
    a dataclass                     a dict with its fields alone; it may lack those that have a default

So a file with an entry of a later version is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

MAX_STEPS = 1 << 53
"""Float64 can't count further."""
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


@contextmanager
def naming_damage(file: Path, remedy: str = "") -> Iterator[None]:
    """Raise each error inside, of whatever kind a crafted file makes it, as a RuntimeError with the file.

    Args:
        file: the file.
        remedy: if given, a ValueError is no damage: it says what the engine lacks, and gets file and remedy.
    """
    try:
        yield
    except Exception as error:
        if remedy and isinstance(error, ValueError):
            raise ValueError(f"{file}: {error}. {remedy}") from None
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


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def misfit(saved: Any, present: Any, *, same_length: bool = False) -> str | None:
    """Tell in words why a saved value cannot take the place of a present one; None where it can.

    Args:
        saved: a plain value.
        present: where it is None, or of a kind that is not known here, anything can.
        same_length: whether sequences must have as many elements.
    """
    if is_number(present) and (not is_number(saved) or math.isnan(float(saved))):
        return f"expected a number like the present {described(present)}, got {described(saved)}"
    for kinds, expected in _EXPECTED:
        if isinstance(present, kinds) and not isinstance(saved, kinds):
            return f"expected {expected}, got {described(saved)}"
    if isinstance(present, Mapping):
        for key in saved:
            if key in present and (problem := misfit(saved[key], present[key], same_length=same_length)):
                return f"'{key}': {problem}"
    elif isinstance(present, list | tuple):
        if same_length and len(saved) != len(present):
            return f"expected a sequence of {len(present)}, got {described(saved)}"
        fill = present[-1:] * max(0, len(saved) - len(present))
        pairs = zip(saved, [*present, *fill], strict=False)
        found = (misfit(one, other, same_length=same_length) for one, other in pairs)
        return next((problem for problem in found if problem is not None), None)
    return None


_EXPECTED: tuple[tuple[Any, str], ...] = (
    (bool, "True or False"),
    (str, "a string"),
    (Mapping, "a dict"),
    (list | tuple, "a sequence"),
)


def is_number(value: Any, most: int = 1) -> bool:
    """True for a real number, and for a tensor of some of them."""
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
        return is_plain and 0 < value.numel() <= most and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: Any, least: int) -> bool:
    """True for a whole number of steps, from `least` on."""
    return bool(least <= value < MAX_STEPS and value == int(value))


def described(value: Any) -> str:
    """Return a value for an error: what a file says may be long."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
