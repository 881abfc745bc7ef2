"""The watchdog: when a rank waits too long, or is lost, all ranks end with a report of each one's status.

main thread   notes the status of this rank in attributes of its `RankStatus`
thread        sends a heartbeat with it, at least every second, to a store that rank 0 holds; reads there
              an alarm, and the heartbeats of rank 0 and of the next rank
alarm         raised by a rank that gave up in a collective, is late in one, watches a rank that is lost,
              or waits and sees that another rank waits in other collectives than its own. Then every rank
              reads the status of all, and waits of main threads are interrupted. A main thread that fails in
              a collective raises that as an error; one that has not done so within seconds is printed
              with its stack, and its process ends.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from textwrap import shorten

import torch
import torch.distributed as dist

from zeroshard.comm import streams
from zeroshard.comm.counter import CONTROL
from zeroshard.comm.watch.status import (
    EXIT,
    FAILURE,
    Ledger,
    RankStatus,
    Status,
    Wait,
    find_difference,
    find_lost,
    report,
)

_MAX_PAUSE_S = 1.0
_PAUSES_PER_LIMIT = 5
_SILENT_PAUSES, _MIN_SILENCE_S = 3, 1.0
"""A rank without a heartbeat for so many pauses, and so many seconds, has died or is stopped. One that waits
longer sends its last collectives to the others, and compares."""
_GRACE_S = 2.0
"""Seconds that the main thread has to raise an error by itself."""
_BUSY_PAUSE_S = 0.05
"""The pause when a report is collected, or the process ends."""
STORE_S = 30.0
"""Seconds that the store may take to answer."""
_EXTRA_BEATS = 3
"""Heartbeats that a rank with a report still sends, so that the others complete theirs."""
_ERROR_WIDTH = 120
_ALARM = "alarm"
"""The key of the alarm in the store; the key of a rank's heartbeat is its number."""
_LOST = Status("has exited: the connection to it is lost", 0.0, end=FAILURE)
"""The status of rank 0, when the store does not answer."""


class Watchdog:
    """Sends the status of this rank to the others, and ends this rank when any rank is stuck or lost.

    Args:
        store: a store that all ranks share; its server is in rank 0's process.
        rank, size: this rank and the number of ranks that are watched.
        name: a name that is the same on all ranks; no other watchdog has it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, name: str) -> None:
        self.name, self.rank_status = name, RankStatus()
        self._store: dist.Store | None = store
        self._rank, self._size = rank, size
        self._limits: list[tuple[weakref.ref[object], float]] = []
        """Each watched engine, and the seconds that its ranks may wait; a new list for each change."""
        self._pause_s = _MAX_PAUSE_S
        self._heard: dict[int, Status | None] = dict.fromkeys(range(size))
        """The last status of each rank."""
        self._beat = 0
        self._alarm: str | None = None
        self._report: str | None = None
        self._has_report = threading.Event()
        self._grace_s = _GRACE_S
        """Without end once the main thread raises an error by itself."""
        self._ending: Status | None = None
        self._closes_at: float | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroshard_watchdog", daemon=True)

    def watches_as(self, rank: int, size: int) -> bool:
        """True if this process is `rank` of `size` ranks and there has been no alarm."""
        is_sound = self._store is not None and self._alarm is None
        return is_sound and (rank, size) == (self._rank, self._size)

    def watch(self, engine: object, limit_s: float) -> None:
        """Watch an engine as long as it exists; its ranks may wait `limit_s`."""
        self._limits = [*self._limits, (weakref.ref(engine), limit_s)]
        # Never longer again: on other ranks an engine may live on that is gone here, with the same pause.
        self._pause_s = min(self._pause_s, limit_s / _PAUSES_PER_LIMIT)
        if not self._thread.is_alive():
            self._thread.start()
        self._wake.set()

    def unwatch(self, engine: object) -> None:
        """Stop to watch an engine that was closed."""
        self._limits = [entry for entry in self._limits if entry[0]() not in (engine, None)]

    def raise_alarm(self, reason: str) -> str:
        """Have all ranks end; the caller raises an error.

        Returns:
            The first alarm, if it is not this one, and the status of each rank. This takes some pauses, in
            which living ranks send a heartbeat.
        """
        self._grace_s = math.inf
        self._alarm = self._alarm or reason
        self._wake.set()
        if self._ending is None:
            self._has_report.wait(2 * self._silence_s + _GRACE_S)
        text = self._report or report(self._statuses(), self._silence_s)
        return text if self._alarm == reason else f"{self._alarm}; {text}"

    def announce_end(self) -> None:
        """Send the others the end of this rank, and its exception."""
        error: BaseException | None = getattr(sys, "last_value", None)  # what the interpreter has printed
        text = "has exited"
        if error is not None:
            text += f" with {type(error).__name__}: {shorten(str(error), _ERROR_WIDTH)}"
        self._ending = Status(text, 0.0, end=EXIT if error is None else FAILURE)
        self._wake.set()

    def close(self, linger_s: float | None = None) -> None:
        """End the thread.

        Args:
            linger_s: seconds for which rank 0 holds the store for ranks that have not left; None: until
                these must have seen that rank 0 has left.
        """
        self._closes_at = time.monotonic() + (self._silence_s if linger_s is None else linger_s)
        self._wake.set()
        self._thread.join(STORE_S)
        self._store = None

    # -- the thread -----------------------------------------------------------------------------------

    @property
    def _limit_s(self) -> float | None:
        """The shortest limit of the watched engines; None if no engine is watched."""
        return min((limit_s for engine, limit_s in self._limits if engine() is not None), default=None)

    @property
    def _silence_s(self) -> float:
        return max(_SILENT_PAUSES * self._pause_s, _MIN_SILENCE_S)

    def _run(self) -> None:
        reported_at = math.inf
        while not self._may_close():
            self._exchange({0, (self._rank + 1) % self._size})
            if self._ending is None and (limit_s := self._limit_s) is not None:
                self._alarm = self._alarm or self._reason(limit_s)
                if self._alarm is not None and self._report is None:
                    self._collect_report()
                    self.rank_status.interrupt()
                    reported_at = time.monotonic()
                if time.monotonic() - reported_at > self._grace_s:
                    self._end_process()
            self._pause()

    def _may_close(self) -> bool:
        if self._closes_at is None:
            return False
        self._exchange(range(self._size))
        if self._rank != 0 or self._store is None or time.monotonic() > self._closes_at:
            return True
        return all(self._is_over(self._heard[rank]) for rank in range(1, self._size))

    def _is_over(self, status: Status | None) -> bool:
        return status is not None and (status.end is not None or status.silent_s >= self._silence_s)

    def _pause(self) -> None:
        is_busy = self._closes_at is not None or (self._alarm is not None and self._limit_s is not None)
        self._wake.wait(_BUSY_PAUSE_S if is_busy else self._pause_s)
        self._wake.clear()

    def _exchange(self, ranks: Iterable[int]) -> None:
        """Send the heartbeat of this rank; read the alarm and the heartbeats of `ranks`."""
        store, ending = self._store, self._ending
        if store is None:
            return
        try:
            if self._alarm is not None:  # the first one stays
                self._alarm = store.compare_set(_ALARM, "", self._alarm).decode()
            elif store.check([_ALARM]):
                self._alarm = store.get(_ALARM).decode()
            self._beat += 1
            own = ending or self.rank_status.message(self._silence_s)
            store.set(str(self._rank), json.dumps(own._replace(beat=self._beat)))
            if ending is not None and self._rank != 0:
                self._store = None  # rank 0 may end now
                return
            for rank in set(ranks) - {self._rank}:
                status, before = Status(*json.loads(store.get(str(rank)))), self._heard[rank]
                if before is None or (status.beat != before.beat and before.end is None):
                    self._heard[rank] = status._replace(heard_at=time.monotonic())
        except RuntimeError:
            self._drop_store()
            return
        first = self._heard[0]
        is_collecting = self._alarm is not None and self._report is None
        has_ended = first is not None and first.end is not None and first.silent_s > self._pause_s
        if has_ended and not is_collecting:
            self._drop_store()  # before it is gone: torch would print a stack

    def _drop_store(self) -> None:
        """Drop the store after rank 0 has ended, which holds it: there are no more heartbeats."""
        self._store, first = None, self._heard[0]
        self._heard = dict.fromkeys(self._heard)
        has_ended = first is not None and first.end is not None
        self._heard[0] = first if has_ended else _LOST._replace(heard_at=time.monotonic())

    def _statuses(self) -> dict[int, Status | None]:
        """Return the last status of each rank, with the present one of this rank."""
        return self._heard | {self._rank: self.rank_status.message(self._silence_s)}

    def _reason(self, limit_s: float) -> str | None:
        """Return the reason of this rank for an alarm; None if it has none."""
        if (label := self.rank_status.find_overdue(self._pause_s)) is not None:
            return f"rank {self._rank} waits too long in the {label}"
        statuses = self._statuses()
        issued = {rank: one.issued for rank, one in statuses.items() if one is not None and one.issued}
        return find_lost(statuses, limit_s) or find_difference(issued)

    def _collect_report(self) -> None:
        """Read the status of all ranks, once each has sent one after it read the alarm, or is silent."""
        everyone, num_extra = range(self._size), 0
        self._exchange(everyone)
        beats = {rank: 2 + one.beat for rank, one in self._heard.items() if one is not None}
        while num_extra < _EXTRA_BEATS:
            self._pause()
            self._exchange(everyone)
            num_extra += self._report is not None
            heard = [(rank, one) for rank, one in self._heard.items() if one is not None]
            is_complete = all(self._is_over(one) or one.beat >= beats.get(rank, 2) for rank, one in heard)
            if self._report is None and is_complete:
                self._report = report(self._statuses(), self._silence_s)
        self._has_report.set()

    def _end_process(self) -> None:
        """End the process, whose main thread does not come to an error of its own."""
        sys.stderr.write(
            f"zeroshard ends rank {self._rank} of {self._size}: {self._alarm}. {self._report}\n"
            "The stacks of its threads, the last call first:\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(2)
        os._exit(1)


_SHORTEST_S = 0.001
"""The shortest timeout: to Gloo, 0 means no timeout."""
_LONGEST_S = 0.5
"""Seconds after which a wait for an agreement checks for an alarm."""
_SOURCE = re.compile(r"\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*|Got the following error when running the callback: ")
"""The place in a backend's code that it puts before a message, and futures of torch around one of a hook."""


class Waits:
    """The waits of this rank in the collectives of one engine.

    Args:
        who: the name of this rank in messages.
        device: the device of collectives that the host does not wait for.
        timeout_s: seconds that a rank waits in a collective before it gives up.
    """

    def __init__(self, who: str, device: torch.device, timeout_s: float) -> None:
        self.who, self._device, self._timeout_s = who, device, timeout_s
        self.rank_status = RankStatus()
        """The status of this rank; the watchdog's, once there is a watchdog."""
        self.ledger = Ledger()
        """The collectives that this rank has issued."""
        self.watchdog: Watchdog | None = None

    def wait_for(self, works: Sequence[dist.Work | None], label: str, kind: str = CONTROL) -> None:
        """Wait for works of a group that serves CPU tensors.

        A wait for an agreement may be repeated, unlike one for a send or a receive: so an alarm ends it.

        Args:
            works: the works of one collective.
            label: the name of the collective in error messages.
            kind: the kind of a counter that the time of the wait is added to; CONTROL for agreements.

        Raises:
            RuntimeError: naming this rank and the collective, when a rank is lost or too late.
        """
        wait = Wait(label, time.monotonic(), self._timeout_s, ledger=self.ledger, works=works)
        status, until = self.rank_status, wait.since + wait.limit_s
        repeats_until = until - _LONGEST_S if kind == CONTROL else 0.0
        status.wait = wait
        try:  # on the hot path, where a context manager costs more than all else here
            for work in works:
                assert work is not None, "this rank is a member of the group"
                while time.monotonic() < repeats_until and not (work.is_completed() or status.is_interrupted):
                    with suppress(RuntimeError):
                        work.wait(timedelta(seconds=_LONGEST_S))
                if status.is_interrupted:
                    raise RuntimeError  # `error` gives the reason
                work.wait(timedelta(seconds=max(_SHORTEST_S, until - time.monotonic())))
        except RuntimeError as error:
            raise self.error(label, error) from None
        finally:
            status.wait = None
            self.ledger.counter.waited_s[kind] += time.monotonic() - wait.since

    def issue(self, label: str) -> streams.Mark:
        """Return the mark of a collective that was issued on the current stream; the watchdog watches it."""
        mark = streams.mark_here(self._device)
        self.rank_status.issue(Wait(label, time.monotonic(), self._timeout_s, mark.is_over, self.ledger))
        return mark

    def error(self, label: str, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for one in a collective, with this rank and the status of the others."""
        reason = shorten(_SOURCE.sub("", str(error)), _ERROR_WIDTH)
        text = (
            f"{self.who} gave up in the {label} after at most {self._timeout_s:g} s: another rank has "
            f"failed, has ended, or did not reach the same point ({reason})"
        )
        if self.rank_status.is_interrupted:
            text = f"{self.who} gave up in the {label}, because a rank has raised an alarm"
        self.rank_status.is_interrupted = True
        if self.watchdog is not None:
            wait = self.rank_status.wait  # None if the connection was closed before: the others wait, too
            self.rank_status.wait = wait or Wait(label, time.monotonic(), self._timeout_s, ledger=self.ledger)
            text += f"; {self.watchdog.raise_alarm(f'{self.who} gave up in the {label}')}"
            self.rank_status.wait = wait
        return RuntimeError(text)
