"""The status of each rank: noted on the hot path, sent to others, and described in messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from zeroshard.comm.watch.ledger import Entries, Ledger

_AT_ONCE = timedelta(milliseconds=1)
"""Gloo closes all connections of a group when a wait for a send or a receive takes longer than its timeout.
Then each wait for one of them ends, that of the main thread too."""
_WAITS, _IS_IN, _ACTION = "waits in the ", "is in ", ", action "
_ON_ALL_RANKS = (
    "has had fewer batches (its data loader is shorter, or it left one out after an exception that it "
    "caught), has run other modules (put these into one unit, see units=), or has left out a call: every "
    "forward (in evaluation too), save_checkpoint, load_checkpoint, save_pretrained and full_state_dict "
    "exchange between ranks: call this on all ranks, equally often"
)
_OUTSIDE = "is outside of forward, backward and optimizer step"


class Status(NamedTuple):
    """The status of a rank, as it sends it to the others."""

    text: str
    """The end of the sentence "rank 3 ..."."""
    seconds: float
    """The seconds since the rank is there."""
    beat: int = 0
    """The number of the heartbeat."""
    has_ended: bool = False
    has_failed: bool = False
    """True if the rank ended with an exception."""
    issued: Entries | None = None
    """The last collectives of a rank that has waited for a while."""

    @staticmethod
    def parse(values: Sequence[Any]) -> Status:
        """Return a status that was sent as JSON."""
        status = Status(*values)
        return status if status.issued is None else status._replace(issued=Entries(*status.issued))


class Sighting(NamedTuple):
    """The last heartbeat of a rank."""

    status: Status
    silent_s: float
    """Seconds since the heartbeat came."""

    @property
    def is_absent(self) -> bool:
        """True when the rank is in no call of ours, or has ended without an exception."""
        return self.status.text == _OUTSIDE or (self.status.has_ended and not self.status.has_failed)


def describe(rank: int, sighting: Sighting | None, silence_s: float) -> str:
    """Describe the status of a rank; after `silence_s` without a heartbeat it counts as lost."""
    if sighting is None:
        return f"nothing is known of rank {rank}"
    status, silent_s = sighting
    if status.has_ended:
        return f"rank {rank} {status.text}"
    place = f"{status.text} since {status.seconds:.1f} s"
    if silent_s < silence_s:
        return f"rank {rank} {place}"
    return f"rank {rank} has exited or is stopped (last heard of {silent_s:.1f} s ago: {place})"


def report(sightings: Mapping[int, Sighting | None], silence_s: float) -> str:
    """Describe the status of all ranks in one line; with advice if they are not in the same call."""
    text = "; ".join(describe(rank, sighting, silence_s) for rank, sighting in sightings.items())
    statuses = [sighting.status for sighting in sightings.values() if sighting is not None]
    waits = [status.text for status in statuses if status.text.startswith(_WAITS)]
    is_in_batch = any(_ACTION in text for text in waits)
    absent = [rank for rank, sighting in sightings.items() if sighting is not None and sighting.is_absent]
    is_any_inside = any(status.text.startswith((_WAITS, _IS_IN)) for status in statuses)
    if is_any_inside and absent:
        text += f". If rank {absent[0]} is not on its way there, it {_ON_ALL_RANKS}"
    elif len(waits) == len(sightings) and len(set(waits)) > 1 and not is_in_batch:
        text += f". If these are not parts of the same call, one of the ranks {_ON_ALL_RANKS}"
    return text


def find_lost(sightings: Mapping[int, Sighting | None], limit_s: float) -> str | None:
    """Name a rank that failed, or was killed, more than `limit_s` ago; None if there is none."""
    for rank, sighting in sightings.items():
        if sighting is None or sighting.silent_s <= limit_s:
            continue
        if sighting.status.has_failed or not sighting.status.has_ended:
            return f"rank {rank} is lost since {sighting.silent_s:.1f} s"
    return None


def _never() -> bool:
    return False


class Wait(NamedTuple):
    """A collective that this rank waits in: its host, or its device."""

    label: str
    since: float
    limit_s: float
    is_over: Callable[[], bool] = _never
    """True, for a collective that was left to the device, once the device has come past it."""
    ledger: Ledger | None = None
    """The ledger in which the collective was noted."""
    works: Sequence[dist.Work | None] = ()
    """The works that the host waits for."""


class RankStatus:
    """The status of this rank. Written on the hot path, read by the watchdog's thread."""

    __slots__ = ("_issued", "_phase", "action", "is_interrupted", "wait")

    def __init__(self) -> None:
        self.action = ""
        """The action of a pipeline that this rank runs, and its pipeline rank; "" outside of a batch."""
        self.wait: Wait | None = None
        """The collective that the host waits in."""
        self._issued: deque[Wait] = deque()
        """Collectives that the host left to the device, the oldest first; some may be over."""
        self.is_interrupted = False
        """True from an alarm on: a wait that begins later raises an error."""
        self.leave()

    def enter(self, phase: str, where: str = "") -> None:
        """Note that this rank enters `phase` ("the forward of ") of `where` ("unit 'layers.3'")."""
        self._phase = (phase, where, time.monotonic())

    def leave(self) -> None:
        """Note that this rank is outside of all phases."""
        self.enter("")

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
        for work in wait.works if wait is not None else ():
            try:
                if work is not None:
                    work.wait(_AT_ONCE)
            except RuntimeError:
                return

    def issued_when_waiting(self, longer_s: float) -> Entries | None:
        """Return the last collectives that were issued, if this rank has waited in one for `longer_s`."""
        for wait in (self.wait, self.on_device):
            if wait is not None and wait.ledger is not None and time.monotonic() - wait.since > longer_s:
                return wait.ledger.entries()
        return None

    def message(self) -> Status:
        """Return this status for the other ranks."""
        now, wait, issued = time.monotonic(), self.wait, self.on_device
        action = f"{_ACTION}{self.action}" if self.action else ""
        if wait is not None:
            return Status(f"{_WAITS}{wait.label}{action}", now - wait.since)
        phase, where, since = self._phase
        text = f"{_IS_IN}{phase or 'a batch'}{where}{action}" if phase or action else _OUTSIDE
        if issued is not None:
            return Status(f"{text}, its device waits in or before the {issued.label}", now - issued.since)
        return Status(text, now - since)

    def find_overdue(self, margin_s: float) -> str | None:
        """Return the collective that this rank has been in for longer than its limit + `margin_s`."""
        for wait in (self.wait, self.on_device):
            if wait is not None and time.monotonic() - wait.since > wait.limit_s + margin_s:
                return wait.label
        return None
