"""The devices, the memory and the limits of this machine."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zeroshard.doctor.versions import first_line
from zeroshard.tiers.budget import folders_of_groups, host_bytes_free

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number near 2**63 where there is no limit."""


class Device(NamedTuple):
    """An accelerator that this process sees."""

    name: str
    free: int | None
    """Bytes that no process has taken; None on ranks other than the first one of a node."""
    total: int
    """Bytes of the device."""
    capability: str
    """Such as "9.0"; "" where the type of device has none."""


class Machine(NamedTuple):
    """The machine as this process sees it; sizes in bytes."""

    host: str
    system: str
    cores: int
    """Cores that this process may run on."""
    cpu_limit: float | None
    """The least number of cores that a control group grants; None without a limit."""
    memory: int
    """Physical memory."""
    memory_free: int
    """Memory that this process can take, within the limits of its control groups."""
    memory_limit: int | None
    """The least limit of a control group; None without one."""
    swap: int
    shared_memory: int | None
    """Size of /dev/shm, through which workers of a DataLoader send batches; None where it is missing."""
    accelerator: str | None
    """The type of the devices; None: there are none."""
    why_none: str
    """The reason why torch sees no accelerator; "" if it sees one."""
    devices: tuple[Device, ...]


def read_machine() -> Machine:
    """Read the facts of this machine."""
    import psutil

    accelerator, why_none = _find_accelerator()
    groups = ""
    with suppress(OSError):
        groups = _GROUPS.read_text(encoding="utf-8")
    shared = None
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_limit=cpu_limit(groups, _ROOT),
        memory=psutil.virtual_memory().total,
        memory_free=host_bytes_free(),
        memory_limit=memory_limit(groups, _ROOT),
        swap=psutil.swap_memory().total,
        shared_memory=shared,
        accelerator=accelerator,
        why_none=why_none,
        devices=read_devices(accelerator),
    )


def _find_accelerator() -> tuple[str | None, str]:
    """Return the type of the accelerators that torch sees, and the reason if it sees none."""
    import torch

    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return found.type, ""
    if not (torch.version.cuda or torch.version.hip):
        return None, f"torch {torch.__version__} is built for CPUs alone"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return None, first_line(error).partition(". ")[0]
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        shown = os.environ["CUDA_VISIBLE_DEVICES"]
        return None, f"torch sees no device; CUDA_VISIBLE_DEVICES is {shown!r}"
    return None, "torch sees no device"


def read_devices(accelerator: str | None) -> tuple[Device, ...]:
    """Return the devices of a type that this process sees; none for None."""
    if accelerator is None:
        return ()
    import torch

    # To ask for free memory makes a context on the device, of hundreds of MB: one rank of a node does.
    module, asks = torch.get_device_module(accelerator), os.environ.get("LOCAL_RANK", "0") == "0"
    found = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        free = module.mem_get_info(index)[0] if asks else None
        numbers = (getattr(properties, "major", None), getattr(properties, "minor", None))
        capability = "" if None in numbers else f"{numbers[0]}.{numbers[1]}"
        found.append(Device(properties.name, free, properties.total_memory, capability))
    return tuple(found)


def memory_limit(groups: str, root: Path) -> int | None:
    """Return the least limit on the memory of this process in bytes; None without one.

    Args:
        groups: the content of /proc/self/cgroup.
        root: the folder of all groups.
    """
    limits = []
    for folder, is_first_version in folders_of_groups(groups, root, "memory"):
        file = "memory.limit_in_bytes" if is_first_version else "memory.max"
        words = _words(folder / file)
        if words and words[0].isdecimal() and int(words[0]) < _UNLIMITED:
            limits.append(int(words[0]))
    return min(limits, default=None)


def cpu_limit(groups: str, root: Path) -> float | None:
    """Return the least number of cores that a control group grants; None without a limit.

    Arguments are those of `memory_limit`.
    """
    limits = []
    for folder, is_first_version in folders_of_groups(groups, root, "cpu"):
        if is_first_version:
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        else:
            words = _words(folder / "cpu.max")
        if len(words) == 2 and all(map(str.isdecimal, words)):  # "max" and -1 are no limits
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
