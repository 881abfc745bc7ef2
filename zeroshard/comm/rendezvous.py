"""Rendezvous: ranks find each other, also when torchrun has started them again.

torchrun's store lives as long as its agent. After a restart it still holds the keys of the earlier ranks. A
rank that asks for the address of another may get that of a dead one, and then waits until its time is over.
So each start of the ranks has a part of the store of its own, whose name rank 0 draws:

    rank 0     sets round = <name>    waits for each <name>/<rank>         sets each <key>
    another    reads round            sets <name>/<rank> = its <key>       waits for <key>, or reads again

A key is drawn by its rank, so only a rank 0 that is alive can have set it. TORCHELASTIC_RESTART_COUNT would
not serve as a name: with several nodes, each agent counts for itself.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_PAUSE_S = 0.02


def open_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return a store for this start of the ranks, at the address in torchrun's environment; collective.

    Raises:
        RuntimeError: some rank did not come within `timeout`.
    """
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    store = dist.PrefixStore("zeroshard", store)
    return dist.PrefixStore(_agree_on_name(store, rank, size, timeout), store)


def check_device_types(store: dist.Store, rank: int, size: int, own: str) -> None:
    """Compare the types of the ranks' devices before a process group is opened; collective.

    Different backends would wait for each other.

    Raises:
        ValueError: on all ranks, with the types and the ranks that have them.
    """
    store.set(f"device/{rank}", own)
    if store.add("num_devices", 1) == size:  # the last rank to come reads the types of all ranks
        ranks: dict[str, list[int]] = {}
        for other in range(size):
            ranks.setdefault(store.get(f"device/{other}").decode(), []).append(other)
        store.set("devices", "; ".join(f"rank(s) {who} on {what}" for what, who in sorted(ranks.items())))
    found = store.get("devices").decode()
    if ";" in found:
        raise ValueError(f"expected devices of one type on all ranks, got {found}")


def _agree_on_name(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    own = uuid4().hex
    if rank == 0:
        store.set("round", own)
        for other in range(1, size):
            store.set(store.get(f"{own}/{other}").decode(), "")
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get("round").decode()
        store.set(f"{name}/{rank}", own)
        time.sleep(_PAUSE_S)
        if store.check([own]):
            return name
    raise RuntimeError(f"rank 0 did not answer rank {rank}")
