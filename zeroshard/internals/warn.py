"""Warnings that name a line of the user."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

_BETWEEN = {"zeroshard", "torch", "contextlib", "safetensors"}
"""The packages whose frames lie between a line of the user and the warning."""


def warn_user(message: str) -> None:
    """Warn at the nearest line that is neither in zeroshard nor in torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def first_of(names: Sequence[str]) -> str:
    """The first three names, and how many more there are; "" of none."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
