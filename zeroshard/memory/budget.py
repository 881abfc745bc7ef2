"""The host memory that tiers need, compared with what this node has, before any is taken.

The kernel hands out more memory than there is, and ends processes later. So a job that cannot fit is refused
at its start, with what needs less. Disk space is reserved where files are made, see `stores/swapfile.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import streams
from zeroshard.comm.collectives import on_all
from zeroshard.comm.mesh import Axes
from zeroshard.config.sections import Config
from zeroshard.memory.tiered import States, bytes_on_tiers
from zeroshard.optim.adopted import num_bits, rule_of
from zeroshard.plan.buffers import plan_units, read_setting
from zeroshard.plan.tiers import Tier
from zeroshard.plan.units import UnitSpec
from zeroshard.stepping.parts import is_known
from zeroshard.stores.swapfile import check_folder
from zeroshard.tables import format_bytes

_REMEDY = (
    'Less is needed with optimizer states of 8 bits, with precision.main_dtype="bf16", and with files: '
    'offload.optimizer="nvme", then offload.parameters="nvme". `zeroshard estimate` lists what fits'
)


def check_room(
    specs: Sequence[UnitSpec], config: Config, axes: Axes, optimizer: Optimizer | None, device: torch.device
) -> None:
    """Refuse an offload for which the node of some rank has no room, on all ranks; collective.

    Call it before a rank allocates.

    Args:
        specs: the units of the model.
        config: the config of the job.
        axes: the axes of the job.
        optimizer: the optimizer, over the original parameters.
        device: the device that computes.

    Raises:
        RuntimeError: the node has less; the message has the bytes of each kind, and says what needs less.
        ValueError: a folder of the nvme tier is not there.
    """
    if config.offload.optimizer == config.offload.parameters == "none":
        return
    by_parts = optimizer is not None and is_known(optimizer)
    host_computes = not streams.has_streams(device)
    setting = read_setting(config, axes.sizes, host_computes=host_computes, steps_by_parts=by_parts)

    def check() -> None:
        num, states = config.gradient_accumulation_steps, _states_of(optimizer)
        tiers = bytes_on_tiers(plan_units(specs, setting), setting, num, states)
        host, folders = tiers[Tier.HOST], (config.offload.nvme_path or "").split(":")
        if "nvme" in (config.offload.optimizer, config.offload.parameters):
            for folder in folders:
                check_folder(Path(folder))
        needed = {
            "main parameters and copies of them": host.parameters,
            "gradients": host.gradients,
            "optimizer states": host.optimizer,
            "buffers for the units in files": host.buffers,
        }
        # A launcher that does not tell the ranks on this node has all of them there.
        check_budget(needed, int(os.environ.get("LOCAL_WORLD_SIZE", axes.world.size)))

    on_all(axes.world, "check of the room for offload", check)


def _states_of(optimizer: Optimizer | None) -> States:
    """Return the states of an optimizer; none for one that is not known, as nobody can count them."""
    rule = None if optimizer is None else rule_of(optimizer)
    if optimizer is None or rule is None:
        return States(num=0)
    largest = max((p for group in optimizer.param_groups for p in group["params"]), key=Tensor.numel)
    return States(num=len(rule.states), bits=num_bits(optimizer, largest))


def check_budget(needed: Mapping[str, int], num_ranks_on_node: int) -> None:
    """Refuse what this node has no room for. Call it on all ranks before one of them allocates.

    Args:
        needed: for each kind of values, the bytes of host memory that a rank will allocate.
        num_ranks_on_node: the ranks that share this node.

    Raises:
        RuntimeError: the node has less. The message has the bytes of each kind, and the remedy.
    """
    total, free = sum(needed.values()) * num_ranks_on_node, host_bytes_free()
    if total > free:
        lines = (
            f"  {kind}: {format_bytes(num_bytes)} on each of {num_ranks_on_node} rank(s)"
            for kind, num_bytes in needed.items()
            if num_bytes
        )
        expected = (
            f"Expected {format_bytes(total)} of host memory on this node, got {format_bytes(free)} free:"
        )
        raise RuntimeError("\n".join((expected, *lines, _REMEDY)))


def host_bytes_free() -> int:
    """Return the bytes that this process can allocate in host memory without ending another process."""
    import psutil  # when tiers are asked for, not with the package

    free: int = psutil.virtual_memory().available
    with suppress(OSError):
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        free = min([free, *limits_of_groups(groups, Path("/sys/fs/cgroup"))])
    return max(0, free)


def limits_of_groups(groups: str, root: Path) -> Iterator[int]:
    """Yield the bytes that each limit on the memory of this process leaves, in control groups of version 2.

    A container sees its own group as the root. So folders that are not there are passed over.

    Args:
        groups: the content of /proc/self/cgroup.
        root: the folder of all groups.
    """
    path = next((line.removeprefix("0::") for line in groups.splitlines() if line.startswith("0::")), "")
    folder = root / path.strip("/")
    while folder.is_relative_to(root):
        with suppress(OSError):
            names = ("memory.max", "memory.current", "memory.stat")
            limit, usage, stat = ((folder / name).read_text(encoding="utf-8").split() for name in names)
            if limit != ["max"]:
                # Pages of files that nobody has used lately, which the kernel drops first.
                kept = dict(zip(stat[::2], stat[1::2], strict=True)).get("inactive_file", 0)
                yield int(limit[0]) - int(usage[0]) + int(kept)
        folder = folder.parent
