"""The kinds of mistakes that the pretend device reports."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """A kind of mistake."""

    RACE = "race"
    """Two accesses of one storage, one of them a write, that no event orders."""
    REUSE = "reuse"
    """Memory is used again although another stream may still use it for what it held before."""
    FREED = "use after free"
    """An operation is issued on memory that has been given back."""
    SYNC = "host sync"
    """The host waits for the device."""
    UNORDERED = "unordered"
    """Two collectives of one communicator on two streams that no event orders."""
    ORDER = "order"
    """Ranks issue the collectives of one communicator in different orders."""
    CYCLE = "cycle"
    """Collectives that wait for each other across ranks: a deadlock."""


class Finding(NamedTuple):
    """One mistake, in words."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
