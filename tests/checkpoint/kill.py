"""Kill ranks with signal 9 while they save: `python -m tests.checkpoint.kill --trials 50`.

Each trial draws from its seed: a layout, how often and under which names is saved, who is killed (one rank or
all at once), and when (at a random time, or at a system call of the save). What is expected:

- the checkpoint that is found is the last or the one before, and has the values of a plain PyTorch run
- every directory that is not hidden is complete
- the ranks that are left end by themselves, with an error, within the watchdog's time
- training goes on from there, and the next save under that name leaves nothing else of it
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from tests.checkpoint.forked import Fork, Group
from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.manifest import check_sums
from zeroshard.checkpoint.save import _CheckedFile
from zeroshard.checkpoint.tensors import open_checkpoint

WATCHDOG_S = 10.0
LIMIT_S = 2 * WATCHDOG_S + 10.0
"""For the ranks that are left: for the error, for a save in the background to end as well, and for a machine
that has other things to do."""
START_S = 120.0
"""For a trial to come to its first save."""

OS_CALLS = {"mkdir": 1, "fsync": 10, "rename": 3, "replace": 2, "unlink": 5, "rmdir": 1}
"""Calls of rank 0 in a save, and about how many there are in each."""
NUM_WRITES = 8
"""About how many writes of a rank there are in a save."""


@dataclass(frozen=True)
class Trial:
    seed: int
    num_ranks: int
    stage: int
    blocking: bool
    tag: str | None
    keep_last: int | None
    victim: int
    kills_all: bool
    call: str | None
    """Before which the victim is killed; None: at a random time."""
    count: int
    """So many of them come first."""
    num_saves: int
    """And so many saves."""
    delay: float
    """In save intervals, where the time is random."""

    @staticmethod
    def draw(seed: int) -> Trial:
        pick = random.Random(seed)
        num_ranks = pick.choice((2, 2, 3))
        victim = pick.randrange(num_ranks)
        calls: dict[str, int] = {"write": NUM_WRITES, **(OS_CALLS if victim == 0 else {"fsync": 1})}
        call = pick.choice((None, *calls))
        return Trial(
            seed=seed,
            num_ranks=num_ranks,
            stage=pick.choice((0, 1, 3, 3)),
            blocking=pick.random() < 0.5,
            tag=pick.choice(("same", None)),
            keep_last=pick.choice((None, 1, 2)),
            victim=victim,
            kills_all=pick.random() < 0.4,
            call=call,
            count=pick.randrange(calls[call]) if call else 0,
            num_saves=pick.randrange(1, 4),
            delay=pick.uniform(0.0, 2.0),
        )


class Block(nn.Module):
    """Its gradient is the same on each rank, and does not depend on its values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(600, 701, generator=generator))
        self.register_buffer("pattern", torch.randn(600, 701, generator=generator), persistent=False)

    def forward(self, scale: Tensor) -> Tensor:
        return (self.weight * self.pattern).sum() * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seed) for seed in range(4))

    def forward(self, step: int) -> Tensor:
        return torch.stack([block(torch.tensor(1.0 / (1 + step))) for block in self.blocks]).sum()


def start(trial: Trial, **config: Any) -> tuple[zeroshard.Engine, torch.optim.Optimizer]:
    model = Net()
    engine, optimizer, _, _ = zeroshard.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        {"watchdog_s": WATCHDOG_S, "checkpoint": {"keep_last": trial.keep_last}} | config,
    )
    assert optimizer is not None
    return engine, optimizer


def train_plainly(num_steps: int, num_ranks: int) -> tuple[Net, torch.optim.Optimizer]:
    """What a run has become that was never killed: plain PyTorch, gradients averaged in rank order."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(step).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            part = parameter.grad * (1 / num_ranks)
            parameter.grad = part.clone()
            for _ in range(num_ranks - 1):
                parameter.grad += part
        optimizer.step()
    return model, optimizer


# ------------------------------------------------------------------------------------- the ranks of a trial


def train(trial: Trial, folder: Path) -> None:
    """Train and save, until a signal ends it."""
    engine, _ = start(trial, stage=trial.stage)
    rank, log = int(os.environ["RANK"]), Log(folder / "log")
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    while True:
        step = engine.global_step
        engine.backward(engine(step))
        engine.step()
        step += 1
        if rank == trial.victim and trial.call is not None and step == trial.num_saves + 1:
            kill_before(trial, folder)
        if rank == 0:
            log.write("begun", step)
        engine.save_checkpoint(folder / "saved", trial.tag, {"step": step}, blocking=trial.blocking)
        if rank == 0:
            log.write("done", step if trial.blocking else step - 1)


def kill_before(trial: Trial, folder: Path) -> None:
    """From now on count the calls of this rank, and at the given one let signal 9 end it, or all."""
    home: Any = _CheckedFile if trial.call == "write" else os
    call = getattr(home, str(trial.call))
    left = trial.count

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if not left:
            others = folder.glob("pid.*") if trial.kills_all else ()
            for pid in [int(file.read_text()) for file in others if file.read_text() != str(os.getpid())]:
                os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return call(*args, **kwargs)

    setattr(home, str(trial.call), counted)


class Log:
    """Lines that outlive the process that wrote them."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, step: int) -> None:
        os.write(self._file, f"{event} {step} {time.monotonic()}\n".encode())


@dataclass
class Events:
    """What a log tells."""

    begun: int = 0
    """The step whose save was begun last."""
    done: int = 0
    """The last one whose save had ended; in the background at least this one."""
    interval: float = 0.0
    """Seconds between two saves."""

    @staticmethod
    def read(file: Path) -> Events:
        events, times = Events(), []
        for line in file.read_text().splitlines() if file.exists() else ():
            event, step, seconds = line.split()
            setattr(events, event, int(step))
            times += [float(seconds)] if event == "begun" else []
        if len(times) > 1:
            events.interval = times[-1] - times[-2]
        return events


# ------------------------------------------------------------------------------------------- what is left


def check(trial: Trial, folder: Path, events: Events) -> None:
    """Load what is found, compare, train on, save; raises what is wrong."""
    saved = folder / "saved"
    for directory in saved.iterdir():
        if directory.is_dir() and not directory.name.startswith("."):
            manifest = open_checkpoint(directory).manifest
            check_sums(directory, manifest, manifest.files)
    try:
        find(saved)
    except ValueError:
        assert events.done == 0, f"no checkpoint, though that of step {events.done} was there"
        return
    engine, optimizer = start(trial, stage=3)
    client_state = engine.load_checkpoint(saved)
    step = engine.global_step
    assert client_state == {"step": step}
    assert events.done <= step <= events.begun, f"step {step}; {events}"
    assert events.begun - events.done <= (1 if trial.blocking else 2), str(events)
    compare(engine, optimizer, *train_plainly(step, trial.num_ranks))
    engine.backward(engine(step))
    engine.step()
    tag = trial.tag or f"step-{step}"
    engine.save_checkpoint(saved, tag)
    names = [path.name for path in saved.iterdir()]
    assert len([name for name in names if name.lstrip(".").startswith(f"{tag}.")]) == 1, names
    engine.load_checkpoint(saved)
    assert engine.global_step == step + 1


def compare(
    engine: zeroshard.Engine, optimizer: torch.optim.Optimizer, model: Net, plain: torch.optim.Optimizer
) -> None:
    """Parameters and states, to the bit."""
    state = engine.full_state_dict()
    for (name, want), got in zip(model.named_parameters(), optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(state[name], want), name
        for key, value in plain.state[want].items():
            assert torch.equal(optimizer.state[got][key].flatten(), value.flatten()), f"{key} of {name}"


# ---------------------------------------------------------------------------------------------- the trials


def problems(trial: Trial, folder: Path) -> Iterator[str]:
    """Run a trial; what went wrong."""
    (folder / "saved").mkdir()
    group = Group(trial.num_ranks, folder, train, trial, folder)
    ranks = group.ranks
    killed = ranks if trial.kills_all else [ranks[trial.victim]]
    reached = _wait_for(
        lambda: Events.read(folder / "log").done >= trial.num_saves and Events.read(folder / "log").interval,
        ranks,
    )
    if trial.call is None and reached:
        time.sleep(trial.delay * Events.read(folder / "log").interval)
        for rank in killed:
            rank.kill()
    if not ranks[trial.victim].wait(START_S):
        yield f"{trial.call} was not called"
    killed_at = ranks[trial.victim].ended_at
    for number, rank in enumerate(ranks):
        ended = rank.wait(LIMIT_S)
        if rank in killed and rank.code != -signal.SIGKILL:
            yield f"rank {number}, which was to be killed, exited with {rank.code}:\n{rank.printed}"
        elif rank not in killed and not ended:
            yield f"rank {number} has not ended {LIMIT_S:g} s after the kill:\n{rank.printed}"
        elif rank not in killed and (rank.code != 1 or "RuntimeError" not in rank.printed):
            yield f"rank {number}, which was left, exited with {rank.code}:\n{rank.printed}"
    survival = max(rank.ended_at for rank in ranks) - killed_at
    group.stop()
    events = Events.read(folder / "log")
    checked = Fork(folder / "check", check, trial, folder, events)
    if not checked.wait(START_S) or checked.code:
        left = sorted(path.name for path in (folder / "saved").iterdir())
        yield f"what is left, {left}, is not as expected:\n{checked.printed}"
    print(f"{trial}: {events}, the others ended after {survival:.1f} s", flush=True)


def _wait_for(condition: Callable[[], Any], ranks: list[Fork]) -> bool:
    until = time.monotonic() + START_S
    while time.monotonic() < until and all(rank.is_running for rank in ranks):
        if condition():
            return True
        time.sleep(0.005)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.kill", description="Kill ranks.")
    parser.add_argument("--trials", type=int, default=50, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    # Not a TemporaryDirectory: every fork would remove it at its exit.
    folder = Path(tempfile.mkdtemp(prefix="kill-trials-"))
    failed, begun_at = [], time.monotonic()
    for seed in range(options.first, options.first + options.trials):
        place = folder / str(seed)
        place.mkdir()
        if lines := list(problems(Trial.draw(seed), place)):
            failed.append(seed)
            print(f"seed {seed} failed, see {place}", *lines, sep="\n", flush=True)
        else:
            shutil.rmtree(place)
    if not failed:
        shutil.rmtree(folder)
    seconds = time.monotonic() - begun_at
    print(f"{options.trials} trials in {seconds:.0f} s, {len(failed)} failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
