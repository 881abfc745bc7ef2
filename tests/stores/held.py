"""The memory of `host_memory` that this process holds, as the garbage collector finds it."""

from __future__ import annotations

import gc
from typing import NamedTuple

from zeroshard.stores import host


class HeldBytes(NamedTuple):
    """Bytes of host memory: all of it, and the part that is pinned."""

    host: int
    pinned: int


def held_bytes() -> HeldBytes:
    own = None, host.unregister  # mappings of files have another call
    mappings = [one for one in gc.get_objects() if type(one) is host.Mapping and one.when_gone in own]
    pinned = sum(len(one) for one in mappings if one.when_gone is not None)
    return HeldBytes(sum(map(len, mappings)), pinned)
