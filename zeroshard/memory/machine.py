"""The rates of this machine, measured: what a plan needs to know of it."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroshard.comm.streams import Stopwatch, has_streams
from zeroshard.memory.budget import host_bytes_free
from zeroshard.stores.host import host_memory

_BYTES = 1 << 28
"""Bytes of a copy, and of the file."""
_WIDTHS = {"cpu": 1024}
"""The rows of a square matrix; 8192 on an accelerator."""
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates with nothing else under way; the best of some rounds."""

    device: str
    """The name of the accelerator, or "cpu"."""
    num_devices: int
    device_bytes: int
    """Memory of a device; on the CPU, of this process."""
    host_bytes: int
    """Host memory that this process can allocate."""
    flops: dict[str, float]
    """Operations per second of products of matrices, by dtype."""
    bandwidth: float
    """Bytes per second that the device reads or writes in its memory."""
    to_host: float | None = None
    """Bytes per second from the device to pinned host memory; None on the CPU."""
    from_host: float | None = None
    disk_write: float | None = None
    """Bytes per second to a new file, until it is on the disk; None if no folder was named."""
    disk_read: float | None = None


def measure_machine(folder: Path | None = None) -> Machine:
    """Measure the current accelerator, or the CPU, in some seconds.

    Args:
        folder: a folder on the disk to measure.

    Raises:
        OSError: the file cannot be made, written or read.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    width = _WIDTHS.get(device.type, 8192)

    def rate(amount: float, work: Callable[[], object]) -> float:
        work()  # kernels are loaded and memory is mapped
        watch = Stopwatch(device)
        for _ in range(_ROUNDS):
            with watch:
                work()
        return amount / max(min(watch.read()), 1e-9)

    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(width, width, dtype=dtype, device=device)
        product = functools.partial(torch.mm, matrix, matrix)
        flops[str(dtype).removeprefix("torch.")] = rate(2 * width**3, product)
    near, other = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    links: dict[str, float] = {}
    if has_streams(device):
        far = host_memory(_BYTES, pinned=device.type == "cuda")
        links["to_host"] = rate(_BYTES, lambda: far.copy_(near, non_blocking=True))
        links["from_host"] = rate(_BYTES, lambda: near.copy_(far, non_blocking=True))
    free = host_bytes_free()
    return Machine(
        device=torch.get_device_module(device).get_device_name(device) if has_streams(device) else "cpu",
        num_devices=torch.accelerator.device_count() if has_streams(device) else 1,
        device_bytes=torch.accelerator.get_memory_info(device)[1] if has_streams(device) else free,
        host_bytes=free,
        flops=flops,
        bandwidth=rate(2 * _BYTES, lambda: other.copy_(near)),
        **links,
        **({} if folder is None else _disk_rates(folder)),
    )


def _disk_rates(folder: Path) -> dict[str, float]:
    watch, block = Stopwatch(torch.device("cpu")), bytes(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file, open(file.name, "r+b", buffering=0) as raw:
        with watch:
            for _ in range(_BYTES // len(block)):
                raw.write(block)
            os.fsync(raw.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        raw.seek(0)
        with watch:
            while raw.read(len(block)):
                pass
    write, read = watch.read()
    return {"disk_write": _BYTES / write, "disk_read": _BYTES / read}
