"""Process groups and the watchdog are closed at exit, in order.

A Gloo group has threads that end when nothing holds the group any more. One that lives on may abort the
process ("terminate called without an active exception"). So at exit: tell the watchdogs of the other ranks,
wait for exchanges under way, forget the groups and the mesh that holds them too, destroy them, and end the
watchdog's thread.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4
from weakref import WeakSet

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import Axes, open_group, open_world, start_process_group, stop_process_group
from zeroshard.comm.watch.status import Status
from zeroshard.comm.watch.watchdog import STORE_S, Watchdog
from zeroshard.internals.warn import warn_user

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
        self.stop_group()
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
    world = open_world(device, timeout_s)
    close_at_exit(world)
    watch(world)
    return world


def watch(axis: Axis) -> None:
    """Have this process's watchdog watch `axis` too; collective. One rank alone has no watchdog."""
    if axis.size > 1:
        _lifecycle.watchdog = open_watchdog(axis, _lifecycle.watchdog)
        if _lifecycle.watchdog is not None:
            axis.watch(_lifecycle.watchdog)


def open_watchdog(axis: Axis, running: Watchdog | None) -> Watchdog | None:
    """Return the running watchdog if it is the watchdog of these ranks, or a new one. Collective.

    Args:
        axis: the ranks.
        running: the watchdog of this process.

    Returns:
        None, after a warning, if a rank cannot connect to rank 0.
    """
    label, rank, size = "agreement on the watchdog", axis.rank, axis.size
    name = running.name if running is not None and running.watches_as(rank, size) else None
    everyone = set(axis.all_gather_object(name, label))
    if name is not None and everyone == {name}:
        return running
    if running is not None:
        running.announce_end()
        running.close(linger_s=0.0)
    timeout = timedelta(seconds=min(STORE_S, axis.timeout_s / 4))  # torch may try longer
    store: dist.TCPStore | None = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    own = (socket.gethostname(), store.port if store is not None else 0, uuid4().hex)
    hosts, ports, names = zip(*axis.all_gather_object(own, label), strict=True)
    address = os.environ.get("MASTER_ADDR", "127.0.0.1" if len(set(hosts)) == 1 else hosts[0])
    problem = None
    try:
        store = store or dist.TCPStore(address, ports[0], is_master=False, timeout=timeout)
        store.set_timeout(timedelta(seconds=STORE_S))
        store.set(str(rank), json.dumps(Status("is in initialize", 0.0)))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"rank {rank} cannot reach rank 0 at {address}:{ports[0]} ({reason})"
    problems = [problem for problem in axis.all_gather_object(problem, label) if problem]
    if problems or store is None:
        warn_user(f"zeroshard runs without its watchdog: {problems[0]}")
        return None
    return Watchdog(store, rank, size, names[0])


def open_background(axis: Axis) -> Axis:
    """Return the ranks of an axis over a Gloo group for one thread of each of them; collective.

    The watchdog does not watch it, and it is closed at exit.
    """
    group = open_group("background", [axis.global_ranks], axis.timeout_s, "gloo")
    own = Axis(group, device=torch.device("cpu"), timeout_s=axis.timeout_s)
    close_at_exit(own)
    return own
