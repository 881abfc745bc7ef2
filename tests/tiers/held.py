"""The memory of `host_memory` that this process holds, as the garbage collector finds it."""

from __future__ import annotations

import gc
from typing import NamedTuple

from zeroshard.tiers import memory


class HeldBytes(NamedTuple):
    """Bytes of host memory: all of it, and the part that is pinned."""

    host: int
    pinned: int


def held_bytes() -> HeldBytes:
    mappings = [one for one in gc.get_objects() if type(one) is memory._Mapping]
    pinned = sum(len(one) for one in mappings if one.is_registered)
    return HeldBytes(sum(map(len, mappings)), pinned)
