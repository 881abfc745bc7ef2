"""Run the benchmarks of a suite one after the other, until they are done or their time is over.

Each outcome is noted in `outcomes.json` beside the documents, so that the page can be drawn again later.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from suite import Benchmark, Budget, Run

OUTCOMES = "outcomes.json"
GRACE_S = 40.0
"""Seconds that a benchmark has to end its ranks, before it is killed; `torchrun` gives them 30."""
TAIL = 12
"""Lines of the output of a failed benchmark that the page shows."""

MEASURED, FAILED, LEFT_OUT, STOPPED = "measured", "failed", "left out", "stopped"
"""The states of an outcome: all is well; an exit status or a time limit; too little time left; Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run, or the reason why it did not begin."""

    name: str
    """Of the run."""
    state: str
    """MEASURED, FAILED, LEFT_OUT or STOPPED."""
    message: str = ""
    """For the page; empty if measured."""
    seconds: float = 0.0
    date: str = ""
    """In UTC, ISO 8601."""


def read_outcomes(folder: Path) -> dict[str, Outcome]:
    """The outcomes of the last run of each name.

    Raises:
        ValueError: the file does not hold outcomes.
    """
    path = folder / OUTCOMES
    if not path.exists():
        return {}
    try:
        return {row["name"]: Outcome(**row) for row in json.loads(path.read_text(encoding="utf-8"))}
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise ValueError(f"Expected outcomes in {path.name}, got {type(error).__name__}: {error}") from error


def note(outcome: Outcome, folder: Path) -> None:
    """Write an outcome in the place of the last one of its name."""
    outcomes = read_outcomes(folder) | {outcome.name: outcome}
    rows = [asdict(one) for one in outcomes.values()]
    (folder / OUTCOMES).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def run_all(benchmarks: Sequence[Benchmark], folder: Path, budget: Budget, console: Console) -> bool:
    """Run the benchmarks; return False if Ctrl-C stopped them.

    Args:
        folder: for the outcomes and the output of each run; the last part of its path is given to the runs.
        budget: the share of their rounds, and the seconds for all of them.
    """
    end = time.monotonic() + budget.limit_s
    folder.mkdir(parents=True, exist_ok=True)
    for run in (run for one in benchmarks for run in one.runs):
        left, needed = end - time.monotonic(), run.estimated_s(budget.scale)
        if needed > left:
            message = (
                f"{max(0, left):.0f} s were left, and it takes about {needed:.0f} s: give more --minutes"
            )
            note(Outcome(name=run.name, state=LEFT_OUT, message=message, date=_now()), folder)
            console.print(f"{run.name}: left out; {message}")
            continue
        console.print(f"{run.name}: about {needed:.0f} s ...")
        try:
            outcome = run_one(run, folder, scale=budget.scale, limit_s=left)
        except KeyboardInterrupt:
            message = "it was stopped while it ran"
            note(Outcome(name=run.name, state=STOPPED, message=message, date=_now()), folder)
            return False
        note(outcome, folder)
        console.print(f"{run.name}: {outcome.state}, {outcome.seconds:.0f} s {outcome.message}", markup=False)
    return True


def run_one(run: Run, folder: Path, *, scale: float, limit_s: float) -> Outcome:
    """Run a script to its end, with its output in a file.

    Raises:
        KeyboardInterrupt: Ctrl-C; the script and its ranks are ended.
    """
    script, *arguments = run.arguments(scale, folder.name)
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    log, start, date = folder / f"{run.name}.log", time.monotonic(), _now()
    with log.open("w", encoding="utf-8") as output:
        # In a session of its own, so that it and its ranks can be ended together.
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            status = process.wait(limit_s)
            failure = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failure = f"it took more than the {limit_s:.0f} s that were left"
        finally:
            _end(process)
    elapsed = time.monotonic() - start
    if not failure:
        return Outcome(name=run.name, state=MEASURED, seconds=round(elapsed, 1), date=date)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    message = "\n".join([f"{failure}; the last lines of its output:", *lines])
    return Outcome(name=run.name, state=FAILED, message=message, seconds=round(elapsed, 1), date=date)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a script and its ranks, if they still run; `torchrun` ends the ranks at the first signal."""
    for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
        end = time.monotonic() + grace_s
        try:
            if process.poll() is None:
                os.killpg(process.pid, number)
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)  # raises an error once the last process is gone
                time.sleep(0.02)
        except ProcessLookupError:
            return


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
