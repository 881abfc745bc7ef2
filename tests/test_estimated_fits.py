"""The time that an estimate takes itself."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zeroshard
from zeroshard.memory.activations import Tokens

ROOT = Path(__file__).parents[1]


def test_a_trillion_parameters_on_4096_ranks_take_less_than_5_seconds():
    started = time.perf_counter()
    for stage in range(4):
        found = zeroshard.estimate(1e12, 4096, {"stage": stage}, num_tokens=Tokens(8192, 4096))
    assert found.parameters == pytest.approx(4e12 / 4096, rel=1e-3)
    assert time.perf_counter() - started < 5


def processor_time(*command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "stdout": subprocess.DEVNULL}
    subprocess.run([sys.executable, *command], check=True, **run)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.long
def test_the_command_takes_little_more_processor_time_than_to_import_torch():
    torch_alone = processor_time("-c", "import torch")  # about 1.9 s; the command then takes 2.0 s
    assert processor_time("-m", "zeroshard", "estimate", "1T", "--ranks", "4096") < 1.8 * torch_alone
