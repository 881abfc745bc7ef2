"""The status of each rank: noted on the hot path, sent to others, and described in messages."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple
from zlib import crc32

import torch.distributed as dist

from zeroshard.comm.counter import SILENT, Counter

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


Entries = tuple[int, Sequence[tuple[str, int, str]]]
"""The last collectives of a ledger, as one rank sends them to another: the ledger's name; and (line, number,
label) of each collective, on each line the oldest first."""


class Ledger:
    """Counts the collectives that this rank issues over the axes of one engine, a line for each communicator.

    Between two communicators the order may differ: ranks whose second forwards differ gather earlier or later
    than they reduce.
    """

    __slots__ = ("_digests", "_last", "counter", "groups", "name", "part")

    def __init__(self) -> None:
        self.name = -1
        """The number of the engine, the same on all ranks; -1 until an engine has its axes."""
        self.part: int | None = None
        """The first rank of those with the same part of the model, where pipeline ranks have other parts."""
        self.groups: dict[str, int] = {}
        """By line, the first rank of this rank's group, where there are several: each has an order of its
        own. Shard groups gather, and tensor groups exchange activations, in the forwards of their own
        ranks."""
        self.counter = Counter()
        """The sums over all collectives; another one begins anew."""
        self._digests = dict.fromkeys(LINES, 0)
        self._last = {line: deque[tuple[int, str]](maxlen=KEPT) for line in LINES}
        """By line, the number and the label of its last collectives."""

    def note(self, label: str, line: str, kind: str = SILENT, num_bytes: int = 0) -> str:
        """Note and count that the next collective of a line is issued, before any other of that line.

        Returns:
            Its name in messages, which is the label.
        """
        last = self._last[line]
        last.append((last[-1][0] + 1 if last else 1, label))
        self._digests[line] = (self._digests[line] * _FACTOR + crc32(label.encode())) & _MASK
        self.counter.bytes_sent[kind] += num_bytes
        self.counter.calls[kind] += 1
        return label

    def entries(self) -> Entries:
        """Return the last `KEPT` collectives of each line; called from any thread."""
        lines = ((self._told(line), tuple(last)) for line, last in self._last.items())
        return self.name, tuple((name, *entry) for name, last in lines for entry in last)

    def proof(self) -> list[int]:
        """Return bytes that are their own maxima over the ranks only where all ranks have equal digests.

        They hold d and 255 - d for each byte d of a digest. Lines with several groups are left out.
        """
        compared = (digest for line, digest in self._digests.items() if line not in self.groups)
        digests = b"".join(digest.to_bytes(_DIGEST_BYTES, "little") for digest in compared)
        return [*digests, *(255 - byte for byte in digests)]

    def _told(self, line: str) -> str:
        if line in self.groups:
            return f"{line} of group {self.groups[line]}"
        return line if self.part is None else f"{line} of part {self.part}"


def find_difference(by_rank: Mapping[int, Entries]) -> str | None:
    """Describe the first collective whose label differs between two ranks; None if there is none.

    Only collectives are compared that both ledgers still hold, so a rank that is behind is no difference.
    """
    if not by_rank:
        return None
    (first, (ledger, expected)), *others = by_rank.items()
    labels = {(line, number): label for line, number, label in expected}
    found = [
        # Forwards only gather: where these differ, other lines do because of it.
        (not line.startswith(GATHER), number, line, rank, label)
        for rank, (of, entries) in others
        for line, number, label in entries
        if of == ledger and labels.get((line, number), label) != label
    ]
    if not found:
        return None
    _, number, line, rank, label = min(found)
    text = (
        f"collective {number} of rank {first} is the {labels[line, number]}, on rank {rank} it is the {label}"
    )
    return text + next((f": {advice}" for part, advice in _ADVICE.items() if part in text), "")


_ADVICE = {
    "all-gather of unit": (
        "at stage 3 all ranks must call the same units in the same order, in forwards that may have a "
        "backward on all ranks or on none (keep loss.item(), or the loss on all ranks). If ranks choose "
        "between modules, put these into one unit: list in units= the class of the module that holds "
        "them, and the classes of blocks that all ranks call"
    ),
    WHOLES: (
        "all ranks must ask for the same whole tensors, at the same costs; a gradient must be there on "
        "all ranks or be None on all of them"
    ),
    STEP: (
        "a rank has left out a step or a batch, perhaps after an exception that it caught; all ranks must "
        "take a step or none"
    ),
}
"""The advice for a difference, by a part of its description; the first that fits holds."""


_AT_ONCE = timedelta(milliseconds=1)
"""Gloo closes all connections of a group when a wait for a send or a receive takes longer than its timeout.
Then each wait for one of them ends, the wait of the main thread, too."""
_WAITS, _IS_IN, _ACTION = "waits in the ", "is in ", ", action "
_ON_ALL_RANKS = (
    "has had fewer batches (its data loader is shorter, or it left one out after an exception that it "
    "caught), has run other modules (put these into one unit, see units=), or has left out a call: every "
    "forward (in evaluation too), save_checkpoint, load_checkpoint, save_pretrained and full_state_dict "
    "exchange between ranks: call this on all ranks, equally often"
)
_OUTSIDE = "is outside of forward, backward and optimizer step"


EXIT, FAILURE = "exit", "failure"
"""The ways in which a rank ends: `FAILURE` by an exception."""


class Status(NamedTuple):
    """The status of a rank, as it sends it to the others."""

    text: str
    """The end of the sentence "rank 3 ..."."""
    seconds: float
    """The seconds since the rank is there."""
    end: str | None = None
    """The way in which the rank has ended."""
    issued: Entries | None = None
    """The last collectives of a rank that has waited for a while."""
    beat: int = 0
    """The number of the heartbeat."""
    heard_at: float = 0.0
    """The time at which this rank has heard of it."""

    @property
    def silent_s(self) -> float:
        """Seconds since the heartbeat came."""
        return time.monotonic() - self.heard_at


Statuses = Mapping[int, Status | None]
"""The last heartbeat of each rank; None for a rank that has sent none."""


def describe(rank: int, status: Status | None, silence_s: float) -> str:
    """Describe the status of a rank; after `silence_s` without a heartbeat it counts as lost."""
    if status is None:
        return f"nothing is known of rank {rank}"
    if status.end is not None:
        return f"rank {rank} {status.text}"
    place = f"{status.text} since {status.seconds:.1f} s"
    if status.silent_s < silence_s:
        return f"rank {rank} {place}"
    return f"rank {rank} has exited or is stopped (last heard of {status.silent_s:.1f} s ago: {place})"


def report(statuses: Statuses, silence_s: float) -> str:
    """Describe the status of all ranks in one line; with advice if they are not in the same call."""
    text = "; ".join(describe(rank, status, silence_s) for rank, status in statuses.items())
    known = {rank: status for rank, status in statuses.items() if status is not None}
    waits = [status.text for status in known.values() if status.text.startswith(_WAITS)]
    absent = [rank for rank, status in known.items() if status.text == _OUTSIDE or status.end == EXIT]
    is_any_inside = any(status.text.startswith((_WAITS, _IS_IN)) for status in known.values())
    if is_any_inside and absent:
        text += f". If rank {absent[0]} is not on its way there, it {_ON_ALL_RANKS}"
    elif len(waits) == len(statuses) and len(set(waits)) > 1 and not any(_ACTION in one for one in waits):
        text += f". If these are not parts of the same call, one of the ranks {_ON_ALL_RANKS}"
    return text


def find_lost(statuses: Statuses, limit_s: float) -> str | None:
    """Name a rank that failed, or was killed, more than `limit_s` ago; None if there is none."""
    for rank, status in statuses.items():
        if status is not None and status.end != EXIT and status.silent_s > limit_s:
            return f"rank {rank} is lost since {status.silent_s:.1f} s"
    return None


class Wait(NamedTuple):
    """A collective that this rank waits in: its host, or its device."""

    label: str
    since: float
    limit_s: float
    is_over: Callable[[], bool] = bool
    """True, for a collective that was left to the device, once the device has come past it; else False."""
    ledger: Ledger | None = None
    """The ledger in which the collective was noted."""
    works: Sequence[dist.Work | None] = ()
    """The works that the host waits for."""


class RankStatus:
    """The status of this rank. Written on the hot path, read by the watchdog's thread."""

    OUTSIDE = ""
    """The phase of a rank that is in no other phase."""

    def __init__(self) -> None:
        self.action = ""
        """The action of a pipeline that this rank runs, and its pipeline rank; "" outside of a batch."""
        self.wait: Wait | None = None
        """The collective that the host waits in."""
        self._issued: deque[Wait] = deque()
        """Collectives that the host left to the device, the oldest first; some may be over."""
        self.is_interrupted = False
        """True from an alarm or an error on: a wait that begins later raises an error."""
        self.enter(self.OUTSIDE)

    def enter(self, phase: str, where: str = "") -> None:
        """Note that it enters `phase` ("the forward of ") of `where` ("unit 'layers.3'"); or OUTSIDE."""
        self._phase = (phase, where, time.monotonic())

    def issue(self, wait: Wait) -> None:
        """Note a collective that the host has left to the device."""
        issued = self._issued
        while issued and issued[0].is_over():
            issued.popleft()
        issued.append(wait)

    @property
    def on_device(self) -> Wait | None:
        """The oldest collective that the device has not come past."""
        return next((wait for wait in tuple(self._issued) if not wait.is_over()), None)

    def interrupt(self) -> None:
        """End the wait of the host with an error; called from another thread."""
        self.is_interrupted = True
        wait = self.wait
        with suppress(RuntimeError):
            for work in filter(None, wait.works if wait is not None else ()):
                work.wait(_AT_ONCE)

    def message(self, patience_s: float = math.inf) -> Status:
        """Return this status for the other ranks, with what was issued if it has waited for `patience_s`."""
        now, on_host, on_device = time.monotonic(), self.wait, self.on_device
        phase, where, since = self._phase
        action = f"{_ACTION}{self.action}" if self.action else ""
        text = f"{_IS_IN}{phase or 'a batch'}{where}{action}" if phase or action else _OUTSIDE
        if on_host is not None:
            text, since = f"{_WAITS}{on_host.label}{action}", on_host.since
        elif on_device is not None:
            text, since = f"{text}, its device waits in or before the {on_device.label}", on_device.since
        long = (wait for wait in filter(None, (on_host, on_device)) if now - wait.since > patience_s)
        issued = next((wait.ledger.entries() for wait in long if wait.ledger is not None), None)
        return Status(text, now - since, issued=issued, heard_at=now)

    def find_overdue(self, margin_s: float) -> str | None:
        """Return the collective that this rank has been in for longer than its limit + `margin_s`."""
        now, waits = time.monotonic(), filter(None, (self.wait, self.on_device))
        return next((wait.label for wait in waits if now - wait.since > wait.limit_s + margin_s), None)
