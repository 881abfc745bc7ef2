"""The process groups that all engines of a process share: a second engine over the same ranks opens none.

A Gloo group takes 3 threads and up to 5 file descriptors, and one of NCCL takes memory of the device. Ranks
drop engines at different times, because garbage is collected at different times. So no group is closed when
an engine goes: a later engine uses it again. torch holds each group until the default group is destroyed;
this module holds weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist


class _Kind(NamedTuple):
    """The groups that may stand in for each other."""

    purpose: str
    parts: tuple[tuple[int, ...], ...]
    timeout_s: float


class _Made(NamedTuple):
    group: weakref.ref[dist.ProcessGroup] | None
    """None if this rank is not a member."""
    world: weakref.ref[dist.ProcessGroup]
    """The default group at that time; `group` ends with it."""


_made: dict[_Kind, _Made] = {}


def shared_group(
    purpose: str,
    parts: Sequence[Sequence[int]],
    timeout_s: float,
    make: Callable[[], object],
    *,
    is_member: bool = True,
) -> dist.ProcessGroup | None:
    """Return the group of this rank that was made for a purpose, or make it; collective the first time.

    Args:
        purpose: groups of different purposes are different communicators, which run beside each other.
        parts: the ranks of each of the groups that are made together, the same on all ranks.
        timeout_s: the timeout of the group.
        make: a function that makes the groups of all parts and returns that of this rank.
        is_member: False if this rank is in none of the parts; then it makes the groups with the others, and
            has none.
    """
    kind, world = _Kind(purpose, tuple(map(tuple, parts)), timeout_s), dist.group.WORLD
    assert world is not None, "groups are made of its ranks"
    made = _made.get(kind)
    is_made = made is not None and made.world() is world
    if not is_member:
        if not is_made:
            make()
            _made[kind] = _Made(None, weakref.ref(world))
        return None
    group = made.group() if made is not None and is_made and made.group is not None else None
    if group is None:
        new = make()
        assert isinstance(new, dist.ProcessGroup), "this rank is a member"
        group, _made[kind] = new, _Made(weakref.ref(new), weakref.ref(world))
    return group
