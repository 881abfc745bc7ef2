"""Process groups and the watchdog are closed at exit, in order.

A Gloo group has threads that end when nothing holds the group any more. One that lives on may abort the
process ("terminate called without an active exception"). So at exit: tell the watchdogs of the other ranks,
wait for exchanges under way, forget the groups and the mesh that holds them too, destroy them, and end the
watchdog's thread.
"""

from __future__ import annotations

import atexit
import functools
from weakref import WeakSet

from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import Axes, stop_process_group
from zeroshard.comm.watch.watchdog import Watchdog, open_watchdog

_DRAIN_S = 5.0


class _Lifecycle:
    def __init__(self) -> None:
        self.holders: WeakSet[Axes | Axis] = WeakSet()
        self.owns_process_group = False
        self.watchdog: Watchdog | None = None

    def close(self) -> None:
        """End everything in the order that the module describes; a second call does nothing."""
        if self.watchdog is not None:
            self.watchdog.leave()
        for holder in list(self.holders):
            holder.close(_DRAIN_S)
        self.holders.clear()
        if self.owns_process_group:
            self.owns_process_group = False
            stop_process_group()
        if self.watchdog is not None:  # last: errors of the other ranks are to find it
            self.watchdog.close()
            self.watchdog = None


_lifecycle = _Lifecycle()


@functools.cache
def _register() -> None:
    atexit.register(_lifecycle.close)


def close_at_exit(*holders: Axes | Axis, owns_process_group: bool = False) -> None:
    """Close holders of process groups when the interpreter ends; then stop the default group if it is ours.

    Each axis is a holder too: a model may keep one when its engine, and so the axes, are gone.
    """
    _register()
    _lifecycle.holders.update(holders)
    _lifecycle.owns_process_group |= owns_process_group


def watch(axis: Axis) -> None:
    """Have this process's watchdog watch `axis` too; collective. One rank alone has no watchdog."""
    if axis.size > 1:
        _lifecycle.watchdog = open_watchdog(
            axis.rank, axis.size, axis.all_gather_object, axis.timeout_s, _lifecycle.watchdog
        )
        if _lifecycle.watchdog is not None:
            axis.watch(_lifecycle.watchdog)
