"""Process groups and the device mesh: who this rank is and how ranks are arranged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.config import Config

DP_SHARD = "dp_shard"
"""The axis over which model states are sharded."""

_TAGS_PER_ENGINE, _NUM_TAG_RANGES = 1 << 16, 1 << 14
_tag_ranges_used = 0


def default_device() -> torch.device:
    """This rank's accelerator (by LOCAL_RANK), else the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "an accelerator is available"
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def start_process_group(device: torch.device, timeout_s: float) -> bool:
    """Start the default process group unless there is one: NCCL on GPUs, else Gloo.

    Without the environment that torchrun sets, it holds this process alone.

    Returns:
        Whether it was started here, so that whoever asked must also stop it.

    Raises:
        RuntimeError: some rank did not come.
    """
    if dist.is_initialized():
        return False
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: not all ranks came to initialize "
                f"within {timeout_s:g} s ({str(error).strip().splitlines()[0]})"
            ) from error
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


def stop_process_group() -> None:
    """Stop the default process group and all groups made from it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(config: Config, device: torch.device) -> DeviceMesh:
    """The mesh that `config` asks for over all ranks of the default group.

    Raises:
        ValueError: the number of ranks does not fit the mesh.
    """
    num_ranks = dist.get_world_size()
    model_parallel = config.mesh.pp * config.mesh.tp
    if num_ranks % model_parallel:
        raise ValueError(
            f"{num_ranks} ranks cannot be arranged with mesh.pp={config.mesh.pp} and "
            f"mesh.tp={config.mesh.tp}: expected a multiple of {model_parallel}"
        )
    return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=(DP_SHARD,))


@dataclass(slots=True, weakref_slot=True, eq=False)
class Axes:
    """The mesh and this rank's view of its axes."""

    mesh: DeviceMesh | None
    """None once closed: a mesh holds its process groups, and so their threads."""
    dp_shard: Axis

    def close(self, drain_s: float) -> None:
        """Wait up to `drain_s` for what is under way and forget the process groups."""
        self.dp_shard.close(drain_s)
        self.mesh = None


def open_axes(mesh: DeviceMesh, device: torch.device, counter: Counter, timeout_s: float) -> Axes:
    """This rank's view of `mesh`; collective: all ranks must call it in the same order.

    Raises:
        ValueError: the mesh has no axis named dp_shard.
    """
    if DP_SHARD not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"expected a mesh with an axis {DP_SHARD!r}, got {mesh.mesh_dim_names}")
    group = mesh.get_group(DP_SHARD)
    control: dist.ProcessGroup | None = None
    if dist.get_backend(group) != "gloo" and dist.get_world_size(group) > 1:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(made, dist.ProcessGroup), "this rank is a member"
        control = made
    axis = Axis(
        group,
        device=device,
        counter=counter,
        timeout_s=timeout_s,
        control=control,
    )
    axis.first_tag = _next_tag_range(axis) % _NUM_TAG_RANGES * _TAGS_PER_ENGINE
    return Axes(mesh=mesh, dp_shard=axis)


def _next_tag_range(axis: Axis) -> int:
    """A number that no engine of any of these ranks has had: they may have been in other groups before."""
    global _tag_ranges_used
    number: int = max(axis.all_gather_object(_tag_ranges_used, "agreement on tags"))
    _tag_ranges_used = number + 1
    return number
