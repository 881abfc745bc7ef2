"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version that was installed; "not installed" when Python runs a checkout."""
    try:
        return version("zeroshard")
    except PackageNotFoundError:
        return "not installed"
