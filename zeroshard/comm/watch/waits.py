"""The waits of this rank for collectives: noted for the watchdog, limited in time, with one form of error."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroshard.comm import streams
from zeroshard.comm.counter import CONTROL, Counter
from zeroshard.comm.watch.ledger import Ledger
from zeroshard.comm.watch.status import RankStatus, Wait
from zeroshard.comm.watch.watchdog import Watchdog

_SHORTEST_S = 0.001
"""The shortest timeout: to Gloo, 0 means no timeout."""
_LONGEST_S = 0.5
"""Seconds after which a wait for an agreement checks for an alarm."""
_POLL_S = 0.0005
"""Seconds between two checks that a device has come past a mark."""


class Waits:
    """The waits of this rank in the collectives of one engine.

    Args:
        who: the name of this rank in messages.
        device: the device of collectives that the host does not wait for.
        timeout_s: seconds that a rank waits in a collective before it gives up.
        counter: adds up the time that the host waits; None for a counter of its own.
    """

    def __init__(
        self, who: str, device: torch.device, timeout_s: float, counter: Counter | None = None
    ) -> None:
        self._counter = counter or Counter()
        self.who, self._device, self._timeout_s = who, device, timeout_s
        self.rank_status = RankStatus()
        """The status of this rank; that of the watchdog, once there is one."""
        self.ledger = Ledger()
        """The collectives that this rank has issued."""
        self.watchdog: Watchdog | None = None
        self.have_failed = False
        """True when a collective has ended in an error, also because of an alarm."""

    def wait_for(self, works: Sequence[dist.Work | None], label: str, kind: str = CONTROL) -> None:
        """Wait for works of a group that serves CPU tensors.

        Args:
            works: the works of one collective.
            label: the name of the collective in error messages.
            kind: one of the kinds of a counter, which the time of the wait is added to.

        Raises:
            RuntimeError: naming this rank and the collective, when a rank is lost or too late.
        """
        wait = Wait(label, time.monotonic(), self._timeout_s, ledger=self.ledger, works=works)
        until = wait.since + wait.limit_s
        self.rank_status.wait = wait
        try:  # on the hot path, where a context manager costs more than all else here
            self._check()
            for work in works:
                assert work is not None, "this rank is a member of the group"
                work.wait(timedelta(seconds=max(_SHORTEST_S, until - time.monotonic())))
        except RuntimeError as error:
            raise self.error(label, error) from None
        finally:
            self.rank_status.wait = None
            self._counter.waited_s[kind] += time.monotonic() - wait.since

    def wait_for_agreement(self, work: dist.Work | None, label: str) -> None:
        """Wait for a collective of the control group; ends at an alarm too, as `wait_for` does."""
        assert work is not None, "this rank is a member of the group"
        with self._waiting(label) as until:
            while True:
                left_s = max(_SHORTEST_S, until - time.monotonic())
                try:
                    work.wait(timedelta(seconds=min(left_s, _LONGEST_S)))
                    return
                except RuntimeError:  # unlike that of a send or receive, this wait may be repeated
                    if work.is_completed():
                        work.wait(timedelta(seconds=_SHORTEST_S))  # raises its own error, if it has one
                        return
                    if left_s <= _LONGEST_S or self.rank_status.is_interrupted:
                        raise

    def wait_for_device(self, mark: streams.Mark, label: str) -> None:
        """Have the host wait until the device has come past a collective.

        Raises:
            RuntimeError: naming this rank and the collective, when a rank is lost or too late.
        """
        with self._waiting(label) as until:
            while not mark.is_over():
                if self.rank_status.is_interrupted or time.monotonic() > until:
                    raise RuntimeError("the device did not reach the end of the collective")
                time.sleep(_POLL_S)

    @contextmanager
    def _waiting(self, label: str) -> Iterator[float]:
        """Note that the host waits inside; the value is the time at which it gives up."""
        wait = Wait(label, time.monotonic(), self._timeout_s, ledger=self.ledger)
        self.rank_status.wait = wait
        try:
            with self.naming(label):
                yield wait.since + wait.limit_s
        finally:
            self.rank_status.wait = None
            self._counter.waited_s[CONTROL] += time.monotonic() - wait.since

    def issue(self, label: str) -> streams.Mark:
        """Return the mark of a collective that was issued on the current stream; the watchdog watches it."""
        mark = streams.mark_here(self._device)
        self.rank_status.issue(Wait(label, time.monotonic(), self._timeout_s, mark.is_over, self.ledger))
        return mark

    @contextmanager
    def naming(self, label: str) -> Iterator[None]:
        """Raise errors inside as errors of this collective; after an alarm, raise one at once."""
        try:
            self._check()
            yield
        except RuntimeError as error:
            raise self.error(label, error) from None

    def _check(self) -> None:
        if self.rank_status.is_interrupted:
            raise RuntimeError("a rank has raised an alarm")

    def error(self, label: str, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for one in a collective, with this rank and the status of the others."""
        self.have_failed = True
        text = (
            f"{self.who} gave up in the {label} after at most {self._timeout_s:g} s: another rank has "
            f"failed, has ended, or did not reach the same point ({_in_our_words(error)})"
        )
        if self.rank_status.is_interrupted:
            text = f"{self.who} gave up in the {label}, because a rank has raised an alarm"
        if self.watchdog is not None:
            wait = self.rank_status.wait
            if wait is None:  # the connection was closed before: for the others this rank is in it as well
                self.rank_status.wait = Wait(label, time.monotonic(), self._timeout_s, ledger=self.ledger)
            text += f"; {self.watchdog.raise_alarm(f'{self.who} gave up in the {label}')}"
            self.rank_status.wait = wait
        return RuntimeError(text)


_REASONS = {
    "Connection closed by peer": "the connection to it is closed",
    "Connection reset by peer": "the connection to it is closed",
    "Broken pipe": "the connection to it is closed",
    "Application timeout caused pair closure": "no answer in time",
    "Timed out waiting": "no answer in time",
    "Operation timed out": "no answer in time",
}
"""Errors of Gloo that mean no more than that another rank is not there, in our words."""

_SOURCE = re.compile(r"\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*")
"""The place in a backend's code that it puts before a message."""


def _in_our_words(error: RuntimeError) -> str:
    text = str(error).strip()
    known = (ours for theirs, ours in _REASONS.items() if theirs in text)
    return next(known, None) or _SOURCE.sub("", text).splitlines()[0]
