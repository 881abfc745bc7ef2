"""How a run ends: at its last line, with an exception, and when a rank is lost.

Importing torch takes seconds, so a process that has imported it forks the ranks of all trials. A rank runs a
script and leaves through the interpreter's own exit, as under torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from tests.ranks import _torchrun_environment

ROOT = Path(__file__).parents[1]

FORK = """
import gc, json, os, sys, time
sys.modules['triton'] = None
import torch, torch._dynamo, torch.distributed.device_mesh, torch.distributed.tensor, zeroshard
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
torch.optim.AdamW([parameter]).step()

trials = json.loads(sys.argv[1])  # of each, for each rank: (environment, script, file for its output)
started = {}
def start(environment, script, output):
    process = os.fork()
    if process == 0:
        os.environ.update(environment)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        return script
    started[process] = output, time.monotonic()
    return None
def run():
    for number, trial in enumerate(trials):
        for rank in trial:
            script = start(*rank)
            if script is not None:
                return script
        if number % 4 == 3:
            collect()
    collect()
    return None
def collect():
    while started:
        process, status = os.wait()
        output, begun = started.pop(process)
        print(json.dumps([output, os.waitstatus_to_exitcode(status), time.monotonic() - begun]), flush=True)
script = run()
if script is not None:
    exec(compile(script, "script.py", "exec"), globals())
"""

MODEL = """
import os, signal, sys, time
import torch, zeroshard
import torch.distributed as dist
from torch import nn
rank = int(os.environ["RANK"])
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(20, 300)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(300, 300), nn.Tanh()) for _ in range(4))
        self.outer = nn.Linear(300, 5)
        self.fails = False
    def forward(self, x):
        x = self.inner(x)
        for number, block in enumerate(self.blocks):
            if self.fails and number == 1:
                raise LookupError("a row is missing")
            x = block(x)
        return self.outer(x)
model = Net()
x, y = torch.randn(4, 20), torch.randn(4, 5)
"""

INITIALIZE = """
engine, optimizer, _, _ = zeroshard.initialize(
    model, torch.optim.AdamW, {"stage": STAGE, "watchdog_s": WATCHDOG}, loss_fn=nn.functional.mse_loss
)
for _ in range(3):
    engine.train_batch(x, y)
"""


class Ending(NamedTuple):
    """How a rank's process ended."""

    code: int
    output: str
    seconds: float


def run(tmp_path: Path, *scripts: str, num_ranks: int = 2, trials: int = 1, timeout: float = 90) -> list[list[Ending]]:
    """Run each script `trials` times on `num_ranks` ranks: the endings by run and rank."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(trials * len(scripts))]
    plan = [
        [
            (_torchrun_environment(rank, num_ranks, store.port), scripts[number % len(scripts)], str(tmp_path / f"{number}.{rank}"))
            for rank in range(num_ranks)
        ]
        for number, store in enumerate(stores)
    ]
    done = subprocess.run(
        [sys.executable, "-c", FORK, json.dumps(plan)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    endings = {}
    for line in done.stdout.splitlines():
        output, code, seconds = json.loads(line)
        endings[output] = Ending(code, Path(output).read_text(errors="replace"), seconds)
    return [[endings[output] for _, _, output in trial] for trial in plan]


def script(*parts: str, stage: int = 3, watchdog: float = 60.0) -> str:
    text = "".join(textwrap.dedent(part) for part in (MODEL, *parts))
    return text.replace("STAGE", str(stage)).replace("WATCHDOG", str(watchdog))
