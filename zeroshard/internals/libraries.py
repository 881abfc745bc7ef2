"""Libraries that make steps fast, and that steps can do without."""

from __future__ import annotations

from collections.abc import Callable

from zeroshard.internals.warn import warn_user


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
