"""Process groups and the watchdog are closed at exit, in order.

A Gloo group has threads that end when nothing holds the group any more. One that lives on may abort the
process ("terminate called without an active exception"). So at exit: tell the watchdogs of the other ranks,
wait for exchanges under way, forget the groups and the mesh that holds them too, destroy them, and end the
watchdog's thread.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from weakref import WeakSet

import torch

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.mesh import Axes, open_group, open_world, start_process_group, stop_process_group
from zeroshard.comm.watch.watchdog import Watchdog, open_watchdog

_DRAIN_S = 5.0


class _Lifecycle:
    def __init__(self) -> None:
        self.holders: WeakSet[Axes | Axis] = WeakSet()
        self.stop_group: Callable[[], object] = object
        """Stops the default group, if it is ours."""
        self.watchdog: Watchdog | None = None

    def close(self) -> None:
        """End everything in the order that the module describes; a second call does nothing."""
        if self.watchdog is not None:
            self.watchdog.announce_end()
        for holder in list(self.holders):
            holder.close(_DRAIN_S)
        self.holders.clear()
        stop, self.stop_group = self.stop_group, object
        stop()
        if self.watchdog is not None:  # last: errors of the other ranks are to find it
            self.watchdog.close()
            self.watchdog = None


_lifecycle = _Lifecycle()


def close_at_exit(*holders: Axes | Axis) -> None:
    """Close holders of process groups when the interpreter ends.

    Each axis is a holder too: a model may keep one when its engine, and so the axes, are gone.
    """
    atexit.unregister(_lifecycle.close)
    atexit.register(_lifecycle.close)  # what is registered last is called first
    _lifecycle.holders.update(holders)


def start_world(device: torch.device, timeout_s: float) -> Axis:
    """Return the axis of all ranks, watched and closed at exit; collective.

    It starts the process group if nobody has; then this process stops it, too.
    """
    if start_process_group(device, timeout_s):
        _lifecycle.stop_group = stop_process_group
    world = open_world(device, Counter(), timeout_s)
    close_at_exit(world)
    watch(world)
    return world


def watch(axis: Axis) -> None:
    """Have this process's watchdog watch `axis` too; collective. One rank alone has no watchdog."""
    if axis.size > 1:
        _lifecycle.watchdog = open_watchdog(
            axis.rank, axis.size, axis.all_gather_object, axis.timeout_s, _lifecycle.watchdog
        )
        if _lifecycle.watchdog is not None:
            axis.watch(_lifecycle.watchdog)


def open_background(axis: Axis) -> Axis:
    """Return the ranks of an axis over a Gloo group for one thread of each of them; collective.

    The watchdog does not watch it, and it is closed at exit.
    """
    group = open_group("background", [axis.global_ranks], axis.timeout_s, "gloo")
    own = Axis(group, device=torch.device("cpu"), counter=Counter(), timeout_s=axis.timeout_s)
    close_at_exit(own)
    return own
