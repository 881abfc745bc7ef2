"""Process groups, and the device mesh in which ranks are arranged.

All engines of a process share groups: a second engine over the same ranks opens none. A Gloo group takes 3
threads and up to 5 file descriptors, and one of NCCL takes memory of the device. Ranks drop engines at
different times, because garbage is collected at different times. So no group is closed when an engine goes: a
later engine uses it again. torch holds each group until the default group is destroyed; this module holds
weak references.

Ranks find each other also when torchrun has started them again.
torchrun's store lives as long as its agent. After a restart it still holds the keys of the earlier ranks. A
rank that asks for the address of another may get the address of a dead rank, and then waits until its time is
over. So each start of the ranks has a part of the store of its own, whose name rank 0 draws:

    rank 0     sets round = <name>    waits for each <name>/<rank>         sets each <key>
    another    reads round            sets <name>/<rank> = its <key>       waits for <key>, or reads again

A key is drawn by its rank, so only a rank 0 that is alive can have set it. TORCHELASTIC_RESTART_COUNT would
not serve as a name: with several nodes, each agent counts for itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from zeroshard.comm.collectives import Axis
from zeroshard.comm.watch.status import GATHER, REDUCE
from zeroshard.plan.arrangement import AXES, DATA, PP, Arrangement, groups_along
from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, TP

_MARGIN_S = 30.0
"""Seconds that NCCL, which ends the process by itself, waits longer than we do: our watchdog takes a pause to
notice, some seconds to collect where all ranks are, and 2 s of grace."""

_TAGS_PER_ENGINE, _NUM_TAG_RANGES = 1 << 16, 1 << 14
"""Engines have ranges of tags in turn. Exchanges of two engines may be under way in other orders on other
ranks, but not if so many engines were made between them."""
_numbers_used = 0


_made: dict[tuple[object, ...], ref[dist.ProcessGroup]] = {}
"""The groups of this rank, by the default group that they end with, purpose, ranks and timeout."""


def open_group(
    purpose: str, parts: Sequence[Sequence[int]], timeout_s: float, backend: str | None = None
) -> dist.ProcessGroup:
    """Return the group of this rank's part that was made for a purpose; make the groups of all parts first.

    Collective: all ranks make all groups in the same order, as the names of groups and NCCL need it.

    Args:
        purpose: groups of different purposes are different communicators, which run at the same time.
        parts: the ranks of each of the groups, the same on all ranks.
        timeout_s: the seconds that our watchdog lets ranks wait.
        backend: the backend; None: as the default group.

    Returns:
        The group; for a rank in none of the parts, the default group.
    """
    world = dist.group.WORLD
    assert world is not None, "groups are made of its ranks"
    key = ref(world), purpose, tuple(map(tuple, parts)), timeout_s
    group = made() if (made := _made.get(key)) is not None else None
    if group is None:
        timeout = group_timeout(backend or dist.get_backend(), timeout_s)
        own, _ = dist.new_subgroups_by_enumeration(
            [list(part) for part in parts], timeout=timeout, backend=backend
        )
        group = own if isinstance(own, dist.ProcessGroup) else world
        _made[key] = ref(group)
    return group


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
        ValueError: on all ranks, with the first rank that has another type than rank 0.
    """
    store.set(f"device/{rank}", own)
    kinds = [kind.decode() for kind in store.multi_get([f"device/{other}" for other in range(size)])]
    for other, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"expected devices of one type on all ranks, got {kinds[0]} on rank 0, {kind} on rank {other}"
            )


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


def start_process_group(device: torch.device, timeout_s: float) -> bool:
    """Start the default process group unless there is one: NCCL on GPUs, else Gloo.

    Without the environment that torchrun sets, it holds this process alone.

    Returns:
        True if this call has started it, so that the caller must stop it.

    Raises:
        RuntimeError: some rank did not come.
        ValueError: the ranks have devices of different types.
    """
    if dist.is_initialized():
        return False
    backend = dist.get_default_backend_for_device(device)
    store: dist.Store = dist.HashStore()
    rank, size = 0, 1
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = open_store(rank, size, timedelta(seconds=timeout_s))
            check_device_types(store, rank, size, device.type)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=group_timeout(backend, timeout_s),
            device_id=None if device.type == "cpu" else device,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} of {size}: not all ranks reached initialize within {timeout_s:g} s "
            f"({str(error).strip().splitlines()[0]})"
        ) from error
    return True


def group_timeout(backend: str, timeout_s: float) -> timedelta:
    """Return the timeout of a process group in which our watchdog lets ranks wait for `timeout_s`."""
    return timedelta(seconds=timeout_s if backend == "gloo" else timeout_s + _MARGIN_S)


def stop_process_group() -> None:
    """Stop the default process group and all groups made from it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(arrangement: Arrangement, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Return the mesh of all ranks of the default group, with the axes that their arrangement asks for."""
    num_ranks, group_size = arrangement.num_ranks, arrangement.shard_group_size
    if group_size is None and arrangement.num_parts == 1:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=(DP_SHARD,))
    sizes = arrangement.sizes._asdict()
    asked = {DP_SHARD} if group_size is None else set(DATA)
    names = tuple(axis for axis in AXES if axis in asked or (axis not in DATA and sizes[axis] > 1))
    # Not by init_device_mesh: its groups would have the default timeout.
    groups = [open_group(axis, arrangement.groups(axis), timeout_s) for axis in names]
    ranks = torch.arange(num_ranks).view([sizes[axis] for axis in names])
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Axes:
    """The mesh and this rank's view of its axes."""

    mesh: DeviceMesh | None
    """None once closed: a mesh holds its process groups, and so their threads."""
    world: Axis
    """All ranks: agreements about a step, and checkpoints. A rank that decided without the others would leave
    them waiting, or go on with other values."""
    everyone: Axis
    """The ranks of `dp` and `tp` together, which hold the same part of the model, rank 0 the first of both:
    agreements about units, and the first broadcast."""
    pp: Axis
    """The ranks that hold other parts of the model, in the order of these parts."""
    dp: Axis
    """The ranks with batches of their own for the same part of the model: the mean of losses."""
    dp_shard: Axis
    """The ranks of this rank's shard group."""
    dp_replicate: Axis
    """The ranks that hold the same shard, one of each group."""
    dp_inner: Axis
    """The part of the shard group that keeps a second copy of the parameters between forward and backward;
    this rank alone where there is none."""
    tp: Axis
    """The ranks that compute parts of the same layers, on the same batches."""
    activations: Axis
    """The ranks of `tp`; on accelerators with a communicator that only the stream of the forward uses. The
    sums of gradients over `tp` run on another stream, at the same time."""
    outer: Axis
    """The ranks with the same shard in replicas that take steps of their own, see `OuterStep`. No other axis
    but `world` joins such replicas, so these need not wait for each other."""

    @staticmethod
    def of_one_group(mesh: DeviceMesh | None, axis: Axis) -> Axes:
        """Return the axes when all data-parallel ranks form one shard group, and no other axis has ranks."""
        alone = axis.over(None)
        names = ("pp", "dp_replicate", "dp_inner", "tp", "activations", "outer")
        return Axes(mesh, world=axis, everyone=axis, dp=axis, dp_shard=axis, **dict.fromkeys(names, alone))

    def __getitem__(self, name: str) -> Axis:
        """The axis that an `Exchange` is over."""
        axis: Axis = getattr(self, name)
        return axis

    @property
    def savers(self) -> Axis:
        """The ranks that write and read one checkpoint together."""
        return self.world if self.outer.size == 1 else self.dp

    @property
    def readers(self) -> Axis:
        """The ranks that have batches of their own, in all replicas."""
        return self.dp if self.outer.size == 1 else self.world

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks of each axis that a plan knows."""
        return {name: self[name].size for name in (DP_REPLICATE, DP_SHARD, DP_INNER, TP)}

    @property
    def places(self) -> list[tuple[int, int]]:
        """The ranks of `everyone`, in order: the number of each in its shard group and its tensor group."""
        assert self.mesh is not None, "the axes are open"
        names = self.mesh.mesh_dim_names or ()
        shard = names.index(DP_SHARD) if DP_SHARD in names else 0
        found = [(self.mesh.mesh == rank).nonzero()[0].tolist() for rank in self.everyone.global_ranks]
        return [(place[shard], place[names.index(TP)] if TP in names else 0) for place in found]

    @property
    def members(self) -> tuple[Axis, ...]:
        """All axes."""
        data = self.dp, self.dp_shard, self.dp_replicate, self.dp_inner
        return self.world, self.everyone, self.pp, *data, self.tp, self.activations, self.outer

    def drain(self, seconds: float) -> None:
        """Wait for exchanges under way."""
        for axis in self.members:
            axis.drain(seconds)

    def close(self, drain_s: float) -> None:
        """Wait up to `drain_s` for exchanges under way and forget the process groups."""
        self.drain(drain_s)
        self.mesh = None


def open_world(device: torch.device, timeout_s: float) -> Axis:
    """Return the axis of all ranks of the default group; collective. `Axis` has the same arguments.

    Raises:
        ValueError: there is no process group.
    """
    ranks, world = list(range(dist.get_world_size())), dist.group.WORLD
    assert world is not None, "its size was asked"
    control = _control_group(world, [ranks], timeout_s)
    return Axis(world, device=device, timeout_s=timeout_s, control=control)


def open_axes(mesh: DeviceMesh, world: Axis, inner_size: int = 1, *, is_local: bool = False) -> Axes:
    """Return this rank's view of `mesh`; collective: all ranks must call it in the same order.

    Args:
        mesh: a mesh of one axis of any name, or with an axis dp_shard. If it has further axes, it holds all
            ranks.
        world: the axis of all ranks.
        inner_size: ranks of a part of the shard group, see `Axes.dp_inner`.
        is_local: True if the replicas of shard groups take steps of their own, see `Axes.outer`.

    Raises:
        ValueError: the mesh has several axes and none is named dp_shard, or its size does not fit.
    """
    names = mesh.mesh_dim_names or ()
    if DP_SHARD not in names and mesh.ndim != 1:
        raise ValueError(
            f"expected a mesh of one axis, or one with an axis {DP_SHARD!r} (and {DP_REPLICATE!r} for hybrid "
            f"sharding), got {mesh.ndim} axes with the names {mesh.mesh_dim_names}: rename its axes, or give "
            "one of them: mesh['name']"
        )
    others = [name for name in (DP_REPLICATE, PP, TP) if name in names]
    if others and mesh.size() != world.size:
        raise ValueError(
            f"expected a mesh with an axis {others[0]!r} to hold all {world.size} ranks, got {mesh.size()}"
        )
    shard = mesh.get_group(DP_SHARD if DP_SHARD in names else 0)
    if is_local or PP in names or TP in names:
        dp = _open_parts("data", mesh, (DP_SHARD,) if is_local else DATA, world)
    elif mesh.size() == world.size:
        dp = world
    else:
        dp = world.over(shard, _control_group(shard, [dist.get_process_group_ranks(shard)], world.timeout_s))
    axes = Axes.of_one_group(mesh, dp)
    axes.world = world if mesh.size() == world.size else dp
    if is_local:
        axes.outer = world.over(mesh.get_group(DP_REPLICATE))
    elif DP_REPLICATE in names:
        axes.dp_shard, axes.dp_replicate = world.over(shard), world.over(mesh.get_group(DP_REPLICATE))
    _open_model_axes(axes, mesh, world)
    if not axes.dp_shard.exchanges and axes.dp_shard.size > 1:
        # The other axes need no second one: dp_inner only gathers, dp_replicate only reduces.
        axes.dp_shard.groups[REDUCE] = _shard_subgroup("reductions", axes, axes.dp_shard.size)
    if 1 < inner_size != axes.dp_shard.size:
        axes.dp_inner = world.over(_shard_subgroup("dp_inner", axes, inner_size))
    number = _take_number(axes.world)
    for axis in axes.members:
        axis.first_tag, axis.ledger.name = number % _NUM_TAG_RANGES * _TAGS_PER_ENGINE, number
    if axes.pp.size > 1 or is_local:
        axes.dp.ledger.part = axes.everyone.global_ranks[0]
    if axes.dp_replicate.size > 1:
        axes.dp.ledger.groups[GATHER] = axes.dp_shard.global_ranks[0]
    return axes


def _open_model_axes(axes: Axes, mesh: DeviceMesh, world: Axis) -> None:
    """Open the axes along which the model is cut; collective."""
    names = mesh.mesh_dim_names or ()
    if TP in names:
        axes.tp = _open_parts(TP, mesh, (TP,), world)
        axes.activations = axes.tp
        if not axes.tp.exchanges:
            axes.activations = _open_parts("activations", mesh, (TP,), world)
        for axis in (axes.tp, axes.activations):
            axis.serve_activations()
        axes.everyone = world
    if PP in names:
        axes.everyone = _open_parts("data and tensor", mesh, (*DATA, TP), world)
        axes.pp = _open_parts(PP, mesh, (PP,), world)


def open_pairs(axes: Axes, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return the groups of this rank for messages between two pipeline ranks; collective.

    Args:
        axes: the axes.
        pairs: (sender, receiver), the same on all ranks in the same order.

    Returns:
        The groups by pair; none on CPUs, where the messages of a pair have an order of their own anyway.
    """
    if axes.pp.exchanges or axes.mesh is None:
        return {}
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    pipelines = _parts_of(axes.mesh, (PP,))
    for pair in pairs:
        parts = [[ranks[number] for number in sorted(pair)] for ranks in pipelines]
        group = open_group(f"messages from {pair[0]} to {pair[1]}", parts, axes.world.timeout_s)
        if axes.pp.rank in pair:
            groups[pair] = group
    return groups


def _control_group(
    group: dist.ProcessGroup, parts: Sequence[Sequence[int]], timeout_s: float, purpose: str = ""
) -> dist.ProcessGroup | None:
    """Return a group of the same ranks for small CPU tensors; None if `group`, of `parts`, serves them."""
    is_served = dist.get_backend(group) == "gloo" or dist.get_world_size(group) == 1
    return None if is_served else open_group(f"{purpose} control", parts, timeout_s, "gloo")


def _shard_subgroup(purpose: str, axes: Axes, size: int) -> dist.ProcessGroup:
    """Return the group of this rank's part, `size` consecutive ranks, of the shard group; collective."""
    group_size = axes.dp_shard.size
    if group_size % size:
        raise ValueError(
            f"reshard_after_forward={size}: expected a divisor of the {group_size} ranks over which "
            "parameters are sharded"
        )
    own = axes.dp_shard.global_ranks
    everyone: list[list[int]] = axes.world.all_gather_object(own, "agreement on shard groups")
    groups = sorted({tuple(ranks) for ranks in everyone})
    parts = [list(ranks[start : start + size]) for ranks in groups for start in range(0, group_size, size)]
    return open_group(purpose, parts, axes.world.timeout_s)


def _open_parts(purpose: str, mesh: DeviceMesh, axes: Sequence[str], world: Axis) -> Axis:
    """Return the axis of the ranks that differ from this one on some axes of the mesh alone; collective."""
    parts = _parts_of(mesh, axes)
    group = open_group(purpose, parts, world.timeout_s)
    return world.over(group, _control_group(group, parts, world.timeout_s, purpose))


def _parts_of(mesh: DeviceMesh, axes: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each group that differ on some axes of the mesh alone."""
    ranks, names = mesh.mesh.flatten().tolist(), mesh.mesh_dim_names or ()
    return [[ranks[number] for number in group] for group in groups_along(mesh.mesh.shape, names, axes)]


def _take_number(world: Axis) -> int:
    """Return a number that no engine of any of these ranks has had; they may have had other groups before."""
    global _numbers_used
    number: int = max(world.all_gather_object(_numbers_used, "agreement on tags"))
    _numbers_used = number + 1
    return number
