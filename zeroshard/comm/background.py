"""The background group: threads beside the main one exchange over it, one thread at a time."""

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


class BackgroundGroup:
    """A Gloo group of all ranks for the background threads of all engines, one after the other.

    Main threads start these threads in the same order on all ranks, so the collectives of the group have one
    order. The watchdog does not watch it.

    Args:
        axis: the axis over that group.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._last: Thread | None = None

    def start(self, work: Callable[[], None], name: str) -> Thread:
        """Start a thread that works once all earlier ones have ended; collective."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            work()

        # Not a daemon: the interpreter waits for it, so that the last checkpoint of a run is written.
        self._last = Thread(target=run, name=name)
        self._last.start()
        return self._last


_open: WeakValueDictionary[int, BackgroundGroup] = WeakValueDictionary()
"""The background groups by the id of the process group, which each of them holds."""


def open_background_group(axis: Axis) -> BackgroundGroup:
    """Return the background group of the ranks of `axis`; collective the first time."""
    ranks, timeout = axis.global_ranks, timedelta(seconds=axis.timeout_s)
    group = shared_group(
        "background", [ranks], axis.timeout_s, lambda: dist.new_group(ranks, backend="gloo", timeout=timeout)
    )
    background = _open.get(id(group))
    if background is None:
        over = Axis(group, device=torch.device("cpu"), counter=Counter(), timeout_s=axis.timeout_s)
        close_at_exit(over)
        background = _open[id(group)] = BackgroundGroup(over)
    return background
