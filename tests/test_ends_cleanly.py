"""How a run ends: at its last line, with an exception, and when a rank is lost.

Importing torch takes seconds, so one process imports it and forks the ranks of all trials. Each rank runs a
script and leaves through the interpreter's own exit, as a script does under torchrun.

What aborts a process whose group is open, or is still held by a mesh, is a thread of Gloo that waits for the
interpreter lock, to drop a tensor, while the interpreter ends. A long switch interval lets that thread wait
until then: so what happens to one run in five happens to every other one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
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
        if number % 3 == 0:
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

MODEL = """
import os, signal, sys, time
import torch, zeroshard
import torch.distributed as dist
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(20, 300), nn.Linear(300, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(300, 300), nn.Tanh()) for _ in range(4))
        self.fails = False

    def forward(self, x):
        x = self.inner(x)
        for number, block in enumerate(self.blocks):
            if self.fails and number == 1:
                raise LookupError("a row is missing")
            x = block(x)
        return self.outer(x)

rank = int(os.environ["RANK"])
model, x, y = Net(), torch.randn(4, 20), torch.randn(4, 5)
"""

TRAIN = """
engine, optimizer, _, _ = zeroshard.initialize(
    model, torch.optim.AdamW, {"stage": STAGE, "watchdog_s": WATCHDOG}, loss_fn=nn.functional.mse_loss
)
for _ in range(3):
    engine.train_batch(x, y)
"""

OWN_GROUP = """
dist.init_process_group("gloo")
"""

FAIL = """
model.fails = True
engine.train_batch(x, y)
"""

FAIL_ON_RANK_1 = """
model.fails = rank == 1
engine.train_batch(x, y)
"""

KILL_RANK_1 = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    engine.train_batch(x, y)
"""

SLEEP_ON_RANK_1 = """
if rank == 1:
    time.sleep(8)
engine.train_batch(x, y)
"""

CLOSE_AND_LIST_THREADS = """
from zeroshard.comm import lifecycle
def threads():
    tasks = "/proc/self/task"
    print(*[open(f"{tasks}/{task}/comm").read().strip() for task in os.listdir(tasks)])
threads()
lifecycle._lifecycle.close()  # what atexit calls
threads()
"""

STILL_OPEN = """
assert dist.is_initialized()
dist.barrier()
print("still open")
dist.destroy_process_group()
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

    def __call__(self, *scripts: str) -> list[tuple[Ending, Ending]]:
        """Run each script on two ranks; the endings of both, by script."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in scripts]
        trials = [
            [
                (_torchrun_environment(rank, 2, store.port), script, f"{folder}/{number}.{rank}")
                for rank in (0, 1)
            ]
            for number, (store, script) in enumerate(zip(stores, scripts, strict=True))
        ]
        print(json.dumps(trials), file=self._process.stdin, flush=True)
        answers = json.loads(self._process.stdout.readline())

        def ending(output: str) -> Ending:
            code, seconds = answers[output]
            return Ending(code, Path(output).read_text(errors="replace"), seconds)

        return [(ending(first[2]), ending(second[2])) for first, second in trials]

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    forks = Forks(tmp_path_factory.mktemp("endings"))
    yield forks
    forks.stop()


def script(*parts: str, stage: int = 3, watchdog_s: float = 60.0) -> str:
    text = "".join(textwrap.dedent(part) for part in (MODEL, *parts))
    return text.replace("STAGE", str(stage)).replace("WATCHDOG", str(watchdog_s))


def test_script_that_simply_ends_exits_with_0_and_says_nothing(run: Forks) -> None:
    endings = run(*[script(TRAIN, stage=stage) for stage in (0, 1, 2, 3)] * 5)
    assert [(ending.code, ending.output) for pair in endings for ending in pair] == [(0, "")] * 40


def test_uncaught_exception_on_all_ranks_is_the_last_thing_said(run: Forks) -> None:
    for pair in run(*[script(TRAIN, FAIL, stage=stage) for stage in (1, 3)] * 3):
        for ending in pair:
            assert (ending.code, ending.last_line) == (1, "LookupError: a row is missing")


def test_no_thread_of_the_groups_is_left_at_exit(run: Forks) -> None:
    for pair in run(*[script(TRAIN, CLOSE_AND_LIST_THREADS, stage=stage) for stage in (1, 3)]):
        for ending in pair:
            assert ending.code == 0, ending.output
            before, after = (line.split() for line in ending.output.splitlines())
            assert "pt_gloo_runloop" in before
            assert "pt_gloo_runloop" not in after


def test_process_group_of_the_user_stays_open(run: Forks) -> None:
    endings = run(*[script(OWN_GROUP, TRAIN, STILL_OPEN, stage=stage) for stage in (1, 3)] * 2)
    assert [(ending.code, ending.output) for pair in endings for ending in pair] == [(0, "still open\n")] * 8


def test_rank_that_is_killed_ends_the_other_with_the_collective(run: Forks) -> None:
    for waiting, killed in run(*[script(TRAIN, KILL_RANK_1, stage=stage) for stage in (0, 3)] * 2):
        assert [waiting.code, killed.code] == [1, -signal.SIGKILL]
        assert waiting.seconds < 20
        assert_gave_up(waiting, rank=0)
        assert "another rank has failed" in waiting.last_line


def test_exception_on_one_rank_ends_the_other_too(run: Forks) -> None:
    ((waiting, failed),) = run(script(TRAIN, FAIL_ON_RANK_1))
    assert [waiting.code, failed.code] == [1, 1]
    assert failed.last_line == "LookupError: a row is missing"
    assert_gave_up(waiting, rank=0)


def test_rank_that_waits_longer_than_the_watchdog_names_the_collective(run: Forks) -> None:
    for waiting, late in run(
        *[script(TRAIN, SLEEP_ON_RANK_1, stage=stage, watchdog_s=1.5) for stage in (0, 3)]
    ):
        assert [waiting.code, late.code] == [1, 1]
        assert "after at most 1.5 s" in waiting.last_line
        assert_gave_up(waiting, rank=0)
        assert_gave_up(late, rank=1)  # the other has ended meanwhile


def test_rank_that_never_comes_to_initialize_is_missed_in_our_words(run: Forks) -> None:
    absent = "\nif rank == 1:\n    raise LookupError('no data')\n"
    ((waiting, failed),) = run(script(absent, TRAIN, watchdog_s=2.0))
    assert [waiting.code, failed.code] == [1, 1]
    assert waiting.last_line.startswith("RuntimeError: ")
    assert "rank 0 of 2" in waiting.last_line


def assert_gave_up(ending: Ending, rank: int) -> None:
    """The last line is our error, with the rank, the collective and the unit."""
    collective = r"(all-gather|reduce-scatter of the gradients) of (unit '[^']+'|the root unit)"
    assert re.match(rf"RuntimeError: rank {rank} of 2 gave up in the {collective} after ", ending.last_line)
