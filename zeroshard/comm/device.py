"""The device on which this rank computes.

`Config.device` is taken as it is. Where it has no index or is None, the rest follows from the surroundings:

type     the accelerator, where there is one and the open process group serves it; else the CPU
index    LOCAL_RANK (torchrun), or its like of srun and mpirun. Where there is none: the current device of a
         process alone, or of one that has left device 0; else the rank modulo the number of devices
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Variables that number the ranks of a node: of torchrun, Slurm's srun, Open MPI, MPICH and Intel MPI."""


def use_device(asked: str | None) -> torch.device:
    """Choose the device of this rank, and make it the current one; torch refuses one that is not there.

    Args:
        asked: `Config.device`.

    Raises:
        ValueError: there is no such type of device, or the process group cannot exchange its tensors.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    accelerator = present.type if present is not None else None
    backends = dist.get_backend_config() if dist.is_initialized() else None
    by_type = dict(pair.split(":") for pair in backends.split(",")) if backends is not None else {}

    def serves(kind: str) -> bool:
        # Gloo takes tensors of a GPU, too, through the host; a group of Gloo alone means the CPU.
        return backends is None or (kind in by_type and (kind == "cpu" or by_type[kind] != "gloo"))

    default = accelerator if accelerator is not None and serves(accelerator) else "cpu"
    wanted = torch.device(asked or default)
    if wanted.type not in ("cpu", accelerator):
        raise ValueError(
            f"config key 'device': expected the CPU or an accelerator that torch sees "
            f"({accelerator or 'there is none'}), got {asked!r}"
        )
    if not serves(wanted.type):
        raise ValueError(
            f"device {wanted.type!r}: the open process group has the backends {backends}, and none of "
            "them serves this type of device. Open the group with another backend, let initialize open it, "
            "or set config.device"
        )
    if wanted.type == "cpu":
        return wanted
    index = _own_index() if str(wanted) == wanted.type else wanted.index  # "cuda" has no index
    torch.accelerator.set_device_index(index)
    return torch.device(wanted.type, index)


def _own_index() -> int:
    """The index of this rank's device, where none was asked for."""
    has_group = dist.is_initialized()
    rank = dist.get_rank() if has_group else int(os.environ.get("RANK", "0"))
    num_ranks = dist.get_world_size() if has_group else int(os.environ.get("WORLD_SIZE", "1"))
    num_devices, current = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    # In the shell of a job, only torchrun's variable is about a process that runs alone.
    names = _LOCAL_RANKS if num_ranks > 1 else _LOCAL_RANKS[:1]
    name = next((name for name in names if os.environ.get(name, "").isdecimal()), None)
    if name is not None:  # the only device is mostly shown to this rank alone
        return 0 if num_devices == 1 else int(os.environ[name])
    return current if num_ranks == 1 or current != 0 else rank % num_devices
