"""Ranks that signal 9 ends while they save; `make kill-trials` has many more.

Each trial draws from its seed: a layout, how often and under which names is saved, who is killed (one rank or
all at once), and at which system call of the save. What is expected:

- the checkpoint that is found is the last or the one before, and has the values of a plain PyTorch run
- every directory that is not hidden is complete
- the ranks that are left end by themselves, with an error
- training goes on from there, and the next save under that name leaves nothing else of it
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.endings import Forks, run  # noqa: F401 (a fixture)
from zeroshard.checkpoint import save
from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.manifest import check_sums
from zeroshard.checkpoint.tensors import open_checkpoint

LIMIT_S = 100
"""The seconds after which a rank of a trial is taken for stuck."""
NUM_TRIALS = int(os.environ.get("KILL_TRIALS", 4))
OS_CALLS = {"mkdir": 1, "fsync": 10, "rename": 3, "replace": 2, "unlink": 5, "rmdir": 1}
"""Calls of rank 0 in a save, and about how many there are in each."""
NUM_WRITES = 8
"""About how many writes of a rank there are in a save."""


@dataclass(frozen=True)
class Trial:
    num_ranks: int
    stage: int
    blocking: bool
    tag: str | None
    keep_last: int | None
    victim: int
    kills_all: bool
    call: str
    """Before which the victim is killed."""
    count: int
    """So many of them come first."""
    num_saves: int
    """And so many saves."""

    @staticmethod
    def draw(seed: int) -> Trial:
        pick = random.Random(seed)
        num_ranks = pick.choice((2, 2, 3))
        victim = pick.randrange(num_ranks)
        calls: dict[str, int] = {"write": NUM_WRITES, **(OS_CALLS if victim == 0 else {"fsync": 1})}
        call = pick.choice(tuple(calls))
        return Trial(
            num_ranks=num_ranks,
            stage=pick.choice((0, 1, 3, 3)),
            blocking=pick.random() < 0.5,
            tag=pick.choice(("same", None)),
            keep_last=pick.choice((None, 1, 2)),
            victim=victim,
            kills_all=pick.random() < 0.4,
            call=call,
            count=pick.randrange(calls[call]),
            num_saves=pick.randrange(1, 4),
        )


class Net(nn.Module):
    """Its gradient is the same on each rank, and does not depend on its values."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(600, 701, generator=generator) for _ in range(4))
        self.register_buffer("pattern", torch.randn(600, 701, generator=generator), persistent=False)

    def forward(self, step: int) -> Tensor:
        return sum(((weight * self.pattern).sum() for weight in self.weights), torch.zeros(())) / (1 + step)


def engine_of(trial: Trial, stage: int) -> Any:
    model = Net()
    config = {"stage": stage, "watchdog_s": 10.0, "checkpoint": {"keep_last": trial.keep_last}}
    return zeroshard.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config).engine


def train_until_killed(seed: int, folder: str) -> None:
    """Train and save, until a signal ends it; `begun` and `done` are the steps whose saves are sure to."""
    signal.alarm(LIMIT_S)
    trial, rank = Trial.draw(seed), int(os.environ["RANK"])
    engine = engine_of(trial, trial.stage)
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))
    while True:
        engine.backward(engine(engine.global_step))
        engine.step()
        step = engine.global_step
        if rank == trial.victim and step == trial.num_saves + 1:
            kill_before(trial, folder)
        if rank == 0:
            log(folder, "begun", step)
        blocking = trial.blocking or step == 1  # or a slow disk leaves no checkpoint to find
        engine.save_checkpoint(f"{folder}/saved", trial.tag, {"step": step}, blocking=blocking)
        if rank == 0:
            log(folder, "done", step if blocking else step - 1)


def log(folder: str, name: str, step: int) -> None:
    """Append a step, so that the file has the step before if another rank kills this one."""
    with Path(folder, name).open("a") as file:
        file.write(f"{step}\n")


def last_logged(folder: str, name: str) -> int:
    path = Path(folder, name)
    return int(["0", *(path.read_text().split() if path.exists() else ())][-1])


def kill_before(trial: Trial, folder: str) -> None:
    """From now on count the calls of this rank, and at the given one let signal 9 end it, or all."""
    home, name = (save, "find_elements") if trial.call == "write" else (os, trial.call)
    call, left = getattr(home, name), trial.count

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if not left:
            others = {int(file.read_text()) for file in Path(folder).glob("pid.*")} - {os.getpid()}
            for pid in (*(others if trial.kills_all else ()), os.getpid()):
                os.kill(pid, signal.SIGKILL)
        left -= 1
        return call(*args, **kwargs)

    setattr(home, name, counted)


def check(seed: int, folder: str) -> None:
    """Load what is found, compare, train on, save; raises what is wrong."""
    trial, saved = Trial.draw(seed), Path(folder, "saved")
    begun, done = last_logged(folder, "begun"), last_logged(folder, "done")
    for directory in saved.iterdir():
        if directory.is_dir() and not directory.name.startswith("."):
            manifest = open_checkpoint(directory).manifest
            check_sums(directory, manifest, manifest.files)
    find(saved)
    engine = engine_of(trial, 3)
    client_state = engine.load_checkpoint(saved)
    step = engine.global_step
    assert client_state == {"step": step}
    assert done <= step <= begun <= done + (1 if trial.blocking else 2), (done, step, begun)
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(step):
        plain.zero_grad()
        model(number).backward()
        for parameter in model.parameters():
            part = parameter.grad * (1 / trial.num_ranks)
            parameter.grad = sum((part for _ in range(trial.num_ranks - 1)), part)
        plain.step()
    state = engine.full_state_dict()
    for (name, want), got in zip(model.named_parameters(), engine.parameters(), strict=True):
        assert torch.equal(state[name], want), name
        for key, value in plain.state[want].items():
            assert torch.equal(engine.optimizer.state[got][key].flatten(), value.flatten()), (
                f"{key} of {name}"
            )
    engine.backward(engine(step))
    engine.step()
    tag = trial.tag or f"step-{step}"
    engine.save_checkpoint(saved, tag)
    names = [path.name for path in saved.iterdir()]
    assert len([name for name in names if name.lstrip(".").startswith(f"{tag}.")]) == 1, names
    engine.load_checkpoint(saved)
    assert engine.global_step == step + 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_TRIALS))
def test_what_is_left_of_a_save_whose_ranks_were_killed_is_a_whole_checkpoint(run: Forks, tmp_path, seed):  # noqa: F811
    trial, script = Trial.draw(seed), "from tests.checkpoint.test_kill import {0}; {0}({1}, {2!r})"
    (ranks,) = run(script.format("train_until_killed", seed, str(tmp_path)), num_ranks=trial.num_ranks)
    for number, rank in enumerate(ranks):
        if trial.kills_all or number == trial.victim:
            assert rank.code == -signal.SIGKILL, rank.output
        else:
            assert rank.code == 1, rank.output
            assert "RuntimeError" in rank.output
    ((checked,),) = run(script.format("check", seed, str(tmp_path)), num_ranks=1)
    assert checked.code == 0, (trial, checked.output)


def test_the_trials_of_the_suite_are_of_different_kinds():
    trials = [Trial.draw(seed) for seed in range(4)]
    for option in ("blocking", "kills_all", "tag", "victim", "call"):
        assert len({getattr(trial, option) for trial in trials}) > 1, option
