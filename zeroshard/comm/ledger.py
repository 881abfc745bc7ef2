"""The collectives that a rank has issued, in order: what must be the same on all ranks of an engine.

On one communicator, NCCL would mix the memory of collectives that come in different orders, without a word,
where their sizes are equal; other transports wait for ever. So each rank counts its collectives and keeps a
digest of their labels. The digests are compared at the end of each backward. The labels that ranks have noted
last are compared by their watchdogs, while the ranks wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

KEPT = 64
"""Labels that are kept. A rank that waits is at most a few units behind another; 64 labels are about 4 kB."""

_DIGEST_BYTES = 8
_FACTOR = 6364136223846793005
"""Knuth's, of the linear congruential generator MMIX: odd, so that no earlier label is ever forgotten."""
_MASK = (1 << 8 * _DIGEST_BYTES) - 1


class Entries(NamedTuple):
    """The last collectives of a ledger, as one rank tells them to another."""

    ledger: int
    """The ledger's name."""
    labels: Sequence[Sequence[int | str]]
    """(number, label) of each, the oldest first."""


class Ledger:
    """Counts the collectives that this rank issues over the axes of one engine."""

    __slots__ = ("_digest", "_last", "count", "name")

    def __init__(self) -> None:
        self.name = -1
        """The same on all ranks, and of no other engine; -1 until an engine has its axes."""
        self.count = 0
        self._digest = 0
        self._last: deque[tuple[int, str]] = deque(maxlen=KEPT)

    def note(self, label: str) -> None:
        """The next collective has been issued, or will be before any other."""
        self.count += 1
        self._digest = (self._digest * _FACTOR + crc32(label.encode())) & _MASK
        self._last.append((self.count, label))

    def entries(self) -> Entries:
        """The last `KEPT` collectives; called from any thread."""
        return Entries(self.name, tuple(self._last))

    def proof(self) -> list[int]:
        """Bytes whose maxima over the ranks tell `is_proven` if all ranks have the same digest."""
        digest = self._digest.to_bytes(_DIGEST_BYTES, "little")
        return [*digest, *(255 - byte for byte in digest)]


def is_proven(maxima: Sequence[int]) -> bool:
    """True when all ranks gave the same `proof`: max(d) + max(255 - d) is 255 only where d is equal."""
    half = len(maxima) // 2
    return all(high + low == 255 for high, low in zip(maxima[:half], maxima[half:], strict=True))


def find_difference(by_rank: Mapping[int, Entries]) -> str | None:
    """The first collective that two ranks have another label for, in words; None where there is none.

    Only numbers are compared that the ledgers of both still hold, so a rank that is behind is no difference.
    """
    (first, expected), *others = by_rank.items()
    labels = _by_number(expected)
    found: list[tuple[int, int, str]] = []
    for rank, entries in others:
        if entries.ledger == expected.ledger:
            theirs = _by_number(entries)
            different = [n for n in theirs.keys() & labels.keys() if theirs[n] != labels[n]]
            found += [(min(different), rank, theirs[min(different)])] if different else []
    if not found:
        return None
    number, rank, label = min(found)
    return (
        f"collective {number} of rank {first} is the {labels[number]}, that of rank {rank} is the {label}: "
        "at stage 3 all ranks must call the same units in the same order; where ranks choose between "
        "modules, config.units must name what holds the choice"
    )


def _by_number(entries: Entries) -> dict[int, str]:
    return {int(number): str(label) for number, label in entries.labels}
