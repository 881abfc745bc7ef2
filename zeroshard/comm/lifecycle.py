"""What initialize opened is closed at exit, in order.

With Gloo, a process that ends while its process group is open, or is still referenced, may abort
("terminate called without an active exception"). So at exit: wait for exchanges under way, forget the
groups, destroy them.
"""

from __future__ import annotations

import atexit
from weakref import WeakSet

from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import stop_process_group

_DRAIN_S = 5.0


class _Lifecycle:
    def __init__(self) -> None:
        self.axes: WeakSet[Axis] = WeakSet()
        self.owns_process_group = False

    def close(self) -> None:
        for axis in list(self.axes):
            axis.close(_DRAIN_S)
        self.axes.clear()
        if self.owns_process_group:
            self.owns_process_group = False
            stop_process_group()


_lifecycle = _Lifecycle()
atexit.register(_lifecycle.close)


def close_at_exit(axis: Axis, *, owns_process_group: bool) -> None:
    """Close `axis` when the interpreter ends; then stop the process group if it was started here."""
    _lifecycle.axes.add(axis)
    _lifecycle.owns_process_group |= owns_process_group
