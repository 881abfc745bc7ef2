"""Scripts on forked ranks, and how their processes end.

Importing torch takes seconds, so one process imports it and forks the ranks of all trials. Each rank runs a
script and leaves through the interpreter's own exit, as a script does under torchrun.

What aborts a process whose group is open, or is still held by a mesh, is a thread of Gloo that waits for the
interpreter lock, to drop a tensor, while the interpreter ends. A long switch interval lets that thread wait
until then: so what happens to one run in five happens to every other one.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from tests.ranks import _torchrun_environment

ROOT = Path(__file__).parents[1]


FORK = """
import gc, json, os, sys, time
sys.modules["triton"] = None  # not used on CPUs, and slow to import and to leave
import torch, torch._dynamo, torch.distributed.device_mesh, torch.distributed.tensor, zeroshard
from tests.worker import ask_no_name_server
ask_no_name_server()
gc.freeze()
sys.setswitchinterval(100)
running, endings = {}, {}

def start(environment, script, output):
    process = os.fork()
    if process:
        running[process] = output, time.monotonic()
        return None
    os.environ.update(environment)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    return script

def collect():
    while running:
        process, status = os.wait()
        output, begun = running.pop(process)
        endings[output] = os.waitstatus_to_exitcode(status), time.monotonic() - begun

def run(trials):
    for number, trial in enumerate(trials, 1):
        for rank in trial:
            script = start(*rank)
            if script is not None:
                return script  # this is the rank
        if number % 4 == 0:
            collect()
    collect()

script = None
for line in iter(sys.stdin.readline, ""):
    script = run(json.loads(line))
    if script is not None:
        break
    print(json.dumps(endings), flush=True)
    endings.clear()
if script is not None:
    exec(compile(script, "script.py", "exec"), globals())
"""


class Ending(NamedTuple):
    """How a rank's process ended."""

    code: int
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Without the name of the rank that torch puts before each line."""
        return self.output.rstrip().splitlines()[-1].split("]: ", 1)[-1]


class Forks:
    """The process that forks. What the fixture `run` gives to a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORK],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *scripts: str, num_ranks: int = 2) -> list[tuple[Ending, ...]]:
        """Run each script on some ranks; the endings of all of them, by script."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in scripts]
        trials = [
            [
                (_torchrun_environment(rank, num_ranks, store.port), script, f"{folder}/{number}.{rank}")
                for rank in range(num_ranks)
            ]
            for number, (store, script) in enumerate(zip(stores, scripts, strict=True))
        ]
        print(json.dumps(trials), file=self._process.stdin, flush=True)
        answers = json.loads(self._process.stdout.readline())

        def ending(output: str) -> Ending:
            code, seconds = answers[output]
            return Ending(code, Path(output).read_text(errors="replace"), seconds)

        return [tuple(ending(output) for _, _, output in trial) for trial in trials]

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@functools.cache
def forks() -> Forks:
    """The process that forks, one for the tests of all files: it takes seconds to start."""
    folder = tempfile.mkdtemp(prefix="endings")
    forks = Forks(Path(folder))
    atexit.register(shutil.rmtree, folder)
    atexit.register(forks.stop)
    return forks


@pytest.fixture
def run() -> Forks:
    return forks()
