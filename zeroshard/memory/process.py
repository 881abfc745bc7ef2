"""The memory of this process as the operating system and torch's allocator count it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Bytes of this process: of the allocator on an accelerator, of the operating system on the CPU."""

    allocated: int | None = None
    """Bytes in tensors, by the allocator of the device, also in tensors of others; None on the CPU."""
    reserved: int | None = None
    """Bytes that the allocator of the device has taken from the driver; None on the CPU."""
    peak_allocated: int | None = None
    """The largest `allocated` since the process began, or since torch's counters were reset."""
    rss: int | None = None
    """Resident memory of the process, with the code of Python and torch; None on an accelerator."""
    peak_rss: int | None = None
    """The largest `rss` since the process began."""


def measure_process(device: torch.device) -> ProcessMemory:
    """Read the counters for a device; the host does not wait for it."""
    if device.type == "cpu":
        import psutil  # when a report is asked for, not with the package

        rss = psutil.Process().memory_info().rss
        return ProcessMemory(
            rss=rss, peak_rss=max(rss, _peak_rss())
        )  # the system's peak may lag by some pages
    return ProcessMemory(
        allocated=torch.accelerator.memory_allocated(device),
        reserved=torch.accelerator.memory_reserved(device),
        peak_allocated=torch.accelerator.max_memory_allocated(device),
    )


def _peak_rss() -> int:
    if _STATUS.exists():  # the ru_maxrss of Linux begins with that of the process that started this one
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, others KiB
