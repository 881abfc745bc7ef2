"""Libraries that make steps fast, and that steps can do without."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module


@cache
def is_usable(library: str, what: str) -> bool:
    """True if a library is there and works; warn once if not.

    Args:
        library: the name to import, and to install.
        what: the work that the library makes fast, for the warning.
    """
    try:
        import_module(library)
    except Exception as error:  # a library that was built for another one may raise anything
        warnings.warn(
            f"{what} without {library} ({error}): steps take several times as long. pip install {library}",
            stacklevel=3,
        )
        return False
    return True
