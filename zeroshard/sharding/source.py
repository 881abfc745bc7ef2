"""Main parameters as the source of other values."""

from __future__ import annotations

from torch import Tensor


class Source:
    """Main parameters as the source of other values; it tells if they have changed since.

    Steps and loads report their writes by `changed()`. Edits by the user count versions of torch, which are
    compared here and nowhere else.
    """

    def __init__(self, main: Tensor) -> None:
        self._main, self._seen = main, main._version

    @property
    def has_changed(self) -> bool:
        """True if the main parameters were written to since `follow`."""
        return self._main._version != self._seen

    def changed(self) -> None:
        """Note a write, perhaps one that counts no version, as by kernels and files."""
        self._seen = -1

    def follow(self) -> None:
        """Note that values were made of them as they are now."""
        self._seen = self._main._version
