"""Warnings that name a line of the user."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence

_BETWEEN = {"zeroshard", "torch", "contextlib", "safetensors"}
"""The packages whose frames lie between a line of the user and the warning."""


def warn_user(message: str) -> None:
    """Warn at the nearest line that is neither in zeroshard nor in torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_first(message: str) -> None:
    """Warn of what all ranks find, on rank 0 of the launcher alone: a group need not be open yet."""
    if os.environ.get("RANK", "0") == "0":
        warn_user(message)


def first_of(names: Sequence[str]) -> str:
    """The first three names, and how many more there are; "" of none."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def works(trial: Callable[[], object], library: str, what: str) -> bool:
    """True if a trial raises no error; else warn.

    Args:
        trial: uses the library.
        library: the name to install.
        what: the work that the library makes fast, for the warning.
    """
    try:
        trial()
    except Exception as error:  # a library that was built for another version may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warn_user(
            f"{what} without {library} ({reason}): steps take several times as long. pip install {library}"
        )
        return False
    return True
