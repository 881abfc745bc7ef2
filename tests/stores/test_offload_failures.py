"""Files that fail in training: one error that names the file, no garbage, and the last checkpoint loads."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard
from tests.checkpoint import runs
from tests.stores.tiers import FILES, OPTIMIZERS, offload, refuse_space

ROOT = Path(__file__).parents[2]


def message_of(action):
    """The error that an action raises; "" if it raises none."""
    try:
        action()
    except (RuntimeError, AttributeError) as error:
        return str(error)
    return ""


def start(folder, **tier):
    return runs.start({"stage": 3, **offload(folder, **tier)}, OPTIMIZERS["AdamW"])


def swap_files(folder):
    return sorted(str(path) for path in Path(folder).rglob("*.swap"))


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


def fail(folder, how, num_good=0):
    """The errors of a step and of what follows; then differences after a load from an undisturbed run."""
    want = start(folder, **FILES)
    runs.train(want, range(4))
    engine = start(folder, **FILES)
    num_steps = 0 if how == "space" else 2
    runs.train(engine, range(num_steps))
    engine.save_checkpoint(folder / "saved")
    runs.token_loss(engine, num_steps).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in engine.parameters())  # so no step waits
    patch = {
        "space": mock.patch("os.posix_fallocate", refuse_space),
        "write": mock.patch("os.pwritev", FailingWrites(num_good)),
        "optimizer": mock.patch("os.posix_fallocate", refuse_space),  # no space is needed
    }
    if how == "optimizer":
        break_state(engine)
    with patch[how]:
        errors = [message_of(engine.step)]
    memory = engine._runtime.context.memory
    parameters = engine.optimizer.param_groups[0]["params"]
    outside = [p.fqn for p in parameters if p.numel() and not memory.is_in_files(p.detach())]
    errors += [message_of(lambda: engine.save_checkpoint(folder / "saved", "after"))]
    engine.load_checkpoint(folder / "saved")
    runs.train(engine, range(num_steps, 4))
    found = runs.differences(runs.state(engine), runs.state(want))
    return errors, outside, found


@pytest.mark.long_where(how=["space"])
@pytest.mark.long_where(num_good=[3])
@pytest.mark.parametrize(("how", "num_good"), [("space", 0), ("optimizer", 0), ("write", 0), ("write", 3)])
def test_a_step_that_fails_can_be_loaded_over(ranks, tmp_path, how, num_good):
    [((step, save), outside, found)] = ranks(1, fail, tmp_path, how, num_good)
    expected = {"space": "could not reserve", "optimizer": "lerp_", "write": "could not write"}[how]
    assert expected in step
    assert how == "optimizer" or ".swap: " in step
    assert "after a step that was interrupted" in save
    assert not outside
    assert not found


def lose(folder, how, tier):
    """The errors of all that needs lost values, the name of the file, and differences after a load."""
    engine = start(folder, **tier)
    runs.train(engine, range(2))
    want = runs.state(engine)
    engine.save_checkpoint(folder / "saved")
    value = runs.token_loss(engine, 2)
    [file] = swap_files(folder)
    (os.unlink if how == "unlink" else lambda path: os.truncate(path, 4096))(file)

    def step():
        engine.backward(value)
        engine.step()

    errors = {
        "step": message_of(step),
        "state_dict": message_of(engine.full_state_dict),
        "forward": message_of(lambda: runs.token_loss(engine, 3)),
        "load": message_of(lambda: engine.load_checkpoint(folder / "saved")),
        "save": message_of(lambda: engine.save_checkpoint(folder / "saved", "after")),
        "close": message_of(engine.close),
        "drop": message_of(lambda: engine.close(restore=False)),
    }
    other = start(folder, **tier)
    other.load_checkpoint(folder / "saved")
    return errors, file, runs.differences(runs.state(other), want)


@pytest.mark.long_where(how=["truncate"])
@pytest.mark.parametrize("how", ["unlink", "truncate"])
def test_lost_files_are_an_error_that_names_them_and_end_no_process(ranks, tmp_path, how):
    parameters = ("state_dict", "forward", "close")
    for tier, also in (({}, ()), (FILES, parameters)):
        [(errors, file, found)] = ranks(1, lose, tmp_path, how, tier)
        for what in ("step", "load", *also):
            assert errors[what].startswith(f"{file}: "), (what, errors)
        assert errors["save"]
        assert not errors["drop"]
        assert not found


# -------------------------------------------------------------------------------------------- ends of runs

SCRIPT = """
import os, signal, sys, torch
from pathlib import Path
from torch import nn
import zeroshard
model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
config = {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "nvme_path": sys.argv[1]}}
engine = zeroshard.initialize(model, torch.optim.AdamW(model.parameters()), config).engine
engine.backward(engine(torch.ones(2, 7)).sum())
engine.step()
assert len(list(Path(sys.argv[1]).rglob("*.swap"))) == 1
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "raise":
    raise ValueError("in training")
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "status"), [("end", 0), ("raise", 1), ("kill", -signal.SIGKILL)])
def test_the_files_of_a_process_go_at_its_end_or_with_the_next_one(tmp_path, how, status):
    def execute(how):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), how]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)

    assert execute(how).returncode == status
    assert len(swap_files(tmp_path)) == (how == "kill")
    assert execute("end").returncode == 0
    assert not swap_files(tmp_path)


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
