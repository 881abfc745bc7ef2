"""Where threads beside the main one exchange: a group of their own, and one thread at a time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.groups import shared_group
from zeroshard.comm.lifecycle import close_at_exit


class Aside:
    """All ranks over a Gloo group of their own, for the threads of all engines, one after the other.

    Main threads start these threads in the same order on all ranks, so the collectives of the group have one
    order. The watchdog does not look after it.

    Args:
        axis: over that group.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._last: Thread | None = None

    def start(self, work: Callable[[], None], name: str) -> Thread:
        """Start a thread that works when the ones before it have ended; collective."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            work()

        # Not a daemon: the interpreter waits for it, so that the last checkpoint of a run is written.
        self._last = Thread(target=run, name=name)
        self._last.start()
        return self._last


_open: WeakValueDictionary[int, Aside] = WeakValueDictionary()
"""By the id of the group, which each of them holds."""


def open_aside(axis: Axis) -> Aside:
    """The place beside the main threads of the ranks of `axis`; collective the first time."""
    ranks, timeout = axis.global_ranks, timedelta(seconds=axis.timeout_s)
    group = shared_group(
        "aside", [ranks], axis.timeout_s, lambda: dist.new_group(ranks, backend="gloo", timeout=timeout)
    )
    aside = _open.get(id(group))
    if aside is None:
        over = Axis(group, device=torch.device("cpu"), counter=Counter(), timeout_s=axis.timeout_s)
        close_at_exit(over)
        aside = _open[id(group)] = Aside(over)
    return aside
