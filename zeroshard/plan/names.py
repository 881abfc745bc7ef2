"""Patterns for the names of parameters and modules.

A pattern fits a parameter by its full name, or by that of a module around it:

    "layers.0.norm.weight"        the full name of a parameter: this one alone
    "*.norm*", "layers.*.router"  with *, ? or [: as in fnmatch, where * stands for dots as well
    "router", "layers.3"          other text: parts of the name between dots, one after the other. It fits at
                                  any depth, and "layers.1" does not fit "layers.10"
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase


def fitting(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names of the parameters that a pattern fits, in order.

    Args:
        pattern: the pattern.
        names: the full names of all parameters of the model.
    """
    if pattern in names:
        return [pattern]
    if any(letter in pattern for letter in "*?["):
        return [n for n in names if any(fnmatchcase(part, pattern) for part in (n, *_modules_around(n)))]
    return [name for name in names if f".{pattern}." in f".{name}."]


def describe_unfit(pattern: str, names: Collection[str]) -> str:
    """Return the message about a pattern that fits no parameter, with names close to it."""
    parts = (part for name in names for part in (name, *_modules_around(name), *name.split(".")))
    close = difflib.get_close_matches(pattern, dict.fromkeys(parts), n=3)
    known = ", ".join(map(repr, close)) or f"{next(iter(names), 'none')!r}, the first of all"
    hint = f"close to it are {known}" if close else f"names are as in named_parameters(): {known}"
    return (
        f"the model has no parameter whose name fits '{pattern}'; {hint}. Expected the name of a parameter "
        "or of a module, or a pattern such as '*.norm*'"
    )


def _modules_around(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))
