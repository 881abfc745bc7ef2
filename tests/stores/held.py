"""The memory of `host_memory` that this process holds, as the garbage collector finds it."""

from __future__ import annotations

import gc
from pathlib import Path
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


def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


class Driver:
    """Stands for the CUDA runtime: notes what is registered, and refuses where it is told to."""

    def __init__(self, status=0):
        self.status, self.registered = status, {}

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        if not self.status:
            self.registered[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address):  # noqa: N802
        assert is_mapped(address)
        del self.registered[address]
        return 0
