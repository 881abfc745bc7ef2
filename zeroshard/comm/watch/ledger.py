"""The ledger: the collectives of a rank in order, which must be the same on all ranks of an engine.

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

GATHER, REDUCE, CONTROL, TENSOR = LINES = ("gather", "reduce", "control", "tensor")
"""The lines of a ledger: parameter gathers, gradient reductions, small agreements, and all that the ranks of
a tensor group exchange."""

STEP = "step of the optimizer"
"""The label of a step, which is no collective: so ranks that have taken different steps differ."""

WHOLES = "computation with"
"""The beginning of the label of a call about whole tensors, which is no collective either."""

KEPT = 64
"""Labels that are kept of each line. A rank that waits is at most a few units behind another; 64 labels are
about 4 kB."""

_DIGEST_BYTES = 8
_FACTOR = 6364136223846793005
"""Knuth's, of the linear congruential generator MMIX: odd, so that no earlier label is ever forgotten."""
_MASK = (1 << 8 * _DIGEST_BYTES) - 1


class Entries(NamedTuple):
    """The last collectives of a ledger, as one rank sends them to another."""

    ledger: int
    """The ledger's name."""
    labels: Sequence[Sequence[int | str]]
    """(line, number, label) of each collective; on each line the oldest first."""


class _Line:
    """The collectives of one communicator."""

    __slots__ = ("count", "digest", "last")

    def __init__(self) -> None:
        self.count = self.digest = 0
        self.last: deque[tuple[int, str]] = deque(maxlen=KEPT)


class Ledger:
    """Counts the collectives that this rank issues over the axes of one engine, a line for each communicator.

    Between two communicators the order may differ: ranks whose second forwards differ gather earlier or later
    than they reduce.
    """

    __slots__ = ("_lines", "groups", "name", "part")

    def __init__(self) -> None:
        self.name = -1
        """The number of the engine, the same on all ranks; -1 until an engine has its axes."""
        self.part: int | None = None
        """The first rank of those with the same part of the model, where pipeline ranks have other parts."""
        self.groups: dict[str, int] = {}
        """By line, the first rank of this rank's group, where there are several: each has an order of its
        own. Shard groups gather, and tensor groups exchange activations, in the forwards of their own
        ranks."""
        self._lines = {line: _Line() for line in LINES}

    def note(self, label: str, line: str) -> None:
        """Note that the next collective of a line is issued, before any other of that line."""
        noted = self._lines[line]
        noted.count += 1
        noted.digest = (noted.digest * _FACTOR + crc32(label.encode())) & _MASK
        noted.last.append((noted.count, label))

    def entries(self) -> Entries:
        """Return the last `KEPT` collectives of each line; called from any thread."""
        lines = ((self._told(name), tuple(line.last)) for name, line in self._lines.items())
        return Entries(self.name, tuple((name, *entry) for name, last in lines for entry in last))

    def proof(self) -> list[int]:
        """Return bytes whose maxima over the ranks `is_proven` takes: it compares the digests of all ranks.

        Lines with several groups are left out.
        """
        lines = (line for name, line in self._lines.items() if name not in self.groups)
        digests = b"".join(line.digest.to_bytes(_DIGEST_BYTES, "little") for line in lines)
        return [*digests, *(255 - byte for byte in digests)]

    def _told(self, line: str) -> str:
        if line in self.groups:
            return f"{line} of group {self.groups[line]}"
        return line if self.part is None else f"{line} of part {self.part}"


def is_proven(maxima: Sequence[int]) -> bool:
    """True when all ranks gave the same `proof`: max(d) + max(255 - d) is 255 only where d is equal."""
    half = len(maxima) // 2
    return all(high + low == 255 for high, low in zip(maxima[:half], maxima[half:], strict=True))


def find_difference(by_rank: Mapping[int, Entries]) -> str | None:
    """Describe the first collective whose label differs between two ranks; None if there is none.

    Only collectives are compared that both ledgers still hold, so a rank that is behind is no difference.
    """
    (first, expected), *others = by_rank.items()
    labels = _by_number(expected)
    found: list[tuple[bool, int, str, int, str]] = []
    for rank, entries in others:
        if entries.ledger == expected.ledger:
            theirs = _by_number(entries)
            different = [key for key in theirs.keys() & labels.keys() if theirs[key] != labels[key]]
            if different:
                # Forwards only gather: where these differ, other lines do because of it.
                is_later, number, line = min((not key[0].startswith(GATHER), *key[::-1]) for key in different)
                found.append((is_later, number, line, rank, theirs[line, number]))
    if not found:
        return None
    _, number, line, rank, label = min(found)
    own = labels[line, number]
    text = f"collective {number} of rank {first} is the {own}, that of rank {rank} is the {label}"
    if "all-gather of unit" in text:
        text += (
            ": at stage 3 all ranks must call the same units in the same order, in forwards that may have a "
            "backward on all ranks or on none (keep loss.item(), or the loss on all ranks). If ranks choose "
            "between modules, put these into one unit: list in units= the class of the module that holds "
            "them, and the classes of blocks that all ranks call"
        )
    elif WHOLES in text:
        text += (
            ": all ranks must ask for the same whole tensors, at the same costs; a gradient must be there on "
            "all ranks or be None on all of them"
        )
    elif STEP in text:
        text += (
            ": a rank has left out a step or a batch, perhaps after an exception that it caught; all ranks "
            "must take a step or none"
        )
    return text


def _by_number(entries: Entries) -> dict[tuple[str, int], str]:
    return {(str(line), int(number)): str(label) for line, number, label in entries.labels}
