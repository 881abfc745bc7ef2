"""Memory of freed tensors goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MIB = 1 << 20
TRIAL = """
from pathlib import Path
import torch
from zeroshard.stores.host import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def filled(num_mib):
    return torch.empty(num_mib << 20, dtype=torch.uint8).fill_(1)

filled(24)  # its end raises the size from which glibc maps
if {calls}:
    return_freed_memory()
before = resident()
tensors = [filled(8) for _ in range(8)]
last = tensors.pop()  # above the others, if they lie in the heap
tensors.clear()
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or sys.platform != "linux", reason="about glibc")
@pytest.mark.long_where(returns=[False])
@pytest.mark.parametrize(
    ("calls", "given", "returns"), [(True, "", True), (False, "", False), (True, "33554432", False)]
)
def test_freed_tensors_leave_nothing_behind_unless_the_user_gave_a_threshold(
    calls: bool, given: str, returns: bool
) -> None:
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": given} if given else {})
    command = [sys.executable, "-c", TRIAL.format(calls=calls)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 12 * MIB) == returns
