"""What initialize opened is closed at exit, in order.

A Gloo group has threads that end when nothing holds the group any more. One that lives on may abort the
process ("terminate called without an active exception"). So at exit: wait for exchanges under way, forget
the groups and the mesh that holds them too, destroy them.
"""

from __future__ import annotations

import atexit
from weakref import WeakSet

from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import Axes, stop_process_group

_DRAIN_S = 5.0


class _Lifecycle:
    def __init__(self) -> None:
        self.holders: WeakSet[Axes | Axis] = WeakSet()
        self.owns_process_group = False

    def close(self) -> None:
        for holder in list(self.holders):
            holder.close(_DRAIN_S)
        self.holders.clear()
        if self.owns_process_group:
            self.owns_process_group = False
            stop_process_group()


_lifecycle = _Lifecycle()
atexit.register(_lifecycle.close)


def close_at_exit(*holders: Axes | Axis, owns_process_group: bool = False) -> None:
    """Close what holds process groups when the interpreter ends; then stop the default group if it is ours.

    Each axis by itself as well: a model may keep one when its engine, and so the axes, are gone.
    """
    _lifecycle.holders.update(holders)
    _lifecycle.owns_process_group |= owns_process_group
