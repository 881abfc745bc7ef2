"""The peak of resident memory while something runs, as Linux tells it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux tells it"
)
SLACK = 8 << 20
"""For what is not a tensor: manifests, archives, and what the allocator keeps."""


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def growth(action: Callable[..., Any], *args: Any, times: int = 1) -> int:
    """Bytes by which the peak of resident memory exceeds what is held before, the least of several times.

    Pages of libraries are not counted: the system takes them from a process and brings them back as it
    likes, and the peak has those that were there before or are there after. Where it brings and takes some in
    one call, that call counts them, so the least of three calls is what the action needs.
    """
    if times > 1:
        return min(growth(action, *args) for _ in range(times))
    ctypes.CDLL(None).malloc_trim(0)  # else memory that was freed before hides what is taken
    pages = status("RssFile")
    before = status("VmRSS") - pages
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    action(*args)
    return status("VmHWM") - max(pages, status("RssFile")) - before


class Rows(nn.Module):
    """A parameter of several boxes and eight of less than one."""

    def __init__(self, large, small):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 512) for rows in (large, *[small] * 8))

    def forward(self, x):
        return sum(table(x).sum() for table in self.tables)
