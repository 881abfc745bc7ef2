"""Files that fail in training: one error that names the folder, no garbage, and the last checkpoint loads."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard
from tests.checkpoint import runs
from tests.ranks import on_ranks
from tests.stores.tiers import FILES, OPTIMIZERS, offload, refuse_space

ROOT = Path(__file__).parents[2]


def message_of(action):
    """The error that an action raises; "" if it raises none."""
    try:
        action()
    except (RuntimeError, AttributeError) as error:
        return str(error)
    return ""


def in_files(folder, **tier):
    return runs.start({"stage": 3, **offload(folder, **tier)}, OPTIMIZERS["AdamW"])


class FailingWrites:
    """os.pwritev that fails from the n-th call on, with an error of the disk."""

    def __init__(self, num_good):
        self.left, self._write = num_good, os.pwritev

    def __call__(self, *args):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._write(*args)


def break_state(engine):
    """Let the optimizer raise an error in a later part than the first."""
    parameter = engine.optimizer.param_groups[0]["params"][5]
    engine.optimizer.state[parameter]["exp_avg"] = "no tensor"


@pytest.mark.long_where(how=["space"])
@pytest.mark.long_where(num_good=[3])
@pytest.mark.parametrize(("how", "num_good"), [("space", 0), ("optimizer", 0), ("write", 0), ("write", 3)])
@on_ranks(1)
def test_a_step_that_fails_can_be_loaded_over(tmp_path, how, num_good):
    want, engine = (in_files(tmp_path, **FILES) for _ in range(2))
    runs.train(want, range(4))
    num_steps = 0 if how == "space" else 2
    runs.train(engine, range(num_steps))
    engine.save_checkpoint(tmp_path / "saved")
    runs.token_loss(engine, num_steps).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in engine.parameters())  # so no step waits
    if how == "optimizer":
        break_state(engine)
    call, fails = (
        ("os.pwritev", FailingWrites(num_good)) if how == "write" else ("os.posix_fallocate", refuse_space)
    )
    with mock.patch(call, fails):
        error = message_of(engine.step)
    expected = {"space": "could not reserve", "optimizer": "lerp_", "write": "could not write"}[how]
    assert expected in error
    assert how == "optimizer" or f"{tmp_path}: " in error
    memory, parameters = engine._runtime.context.memory, engine.optimizer.param_groups[0]["params"]
    assert all(memory.is_in_files(p.detach()) for p in parameters if p.numel())
    assert "after a step that was interrupted" in runs.refusal(
        lambda: engine.save_checkpoint(tmp_path, "after")
    )
    engine.load_checkpoint(tmp_path / "saved")
    runs.train(engine, range(num_steps, 4))
    return runs.differences(runs.state(engine), runs.state(want))


# --------------------------------------------------------------------------------------------------- memory

WIDTH, NUM_UNITS = 1024, 16
UNIT = 3 * 4 * WIDTH**2
"""Bytes of a unit: main parameters and two states."""
SLACK = 16 << 20
"""Bytes that the heap of a process may take and keep, by what earlier tests have left of it."""


class Wide(nn.Module):
    def __init__(self, num_units):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(num_units)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(folder, num_units):
    """Bytes by which the peak of resident memory exceeds that before the engine, by action.

    Pages of libraries are not counted: the system takes them from a process and brings them back as it likes.
    The peak may be of a time before or after it has taken them.
    """
    found = {}
    folder.mkdir()

    def peak(name, action):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        pages = status("RssFile")
        result = action()
        found[name] = status("VmHWM") - max(pages, status("RssFile")) - before
        return result

    def build():
        with zeroshard.deferred_init():
            model = Wide(num_units)
        config = {"stage": 3, "clip_grad_norm": None, **offload(folder, **FILES, step_in_backward=True)}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return zeroshard.initialize(model, optimizer, config).engine

    def train():
        for _ in range(2):
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()

    def write_back():
        for block in engine.module.blocks:
            with engine.unsharded(block, write_back=True), torch.no_grad():
                block[0].weight.add_(1)

    ctypes.CDLL(None).malloc_trim(0)  # smaller memory that was freed before
    before = status("VmRSS") - status("RssFile")
    engine = peak("build", build)
    peak("steps", train)
    peak("save", lambda: engine.save_checkpoint(folder / "saved"))
    peak("load", lambda: engine.load_checkpoint(folder / "saved"))
    peak("write back", write_back)
    return found


# A process that has run nothing else: the heap of another one has room from before, and grows by it.
MEASURE = """
import json, sys
from pathlib import Path
from tests.stores.test_offload_failures import NUM_UNITS, measure
measure(Path(sys.argv[1], "first"), 2)  # imports, threads and their heaps
print(json.dumps(measure(Path(sys.argv[1], "second"), NUM_UNITS)))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux tells it")
def test_memory_holds_a_few_units(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(printed.stdout.splitlines()[-1])
    assert NUM_UNITS * UNIT > 2 * (4 * UNIT + SLACK)
    assert {name: size for name, size in found.items() if size > 4 * UNIT + SLACK} == {}, found
