"""The example under torchrun, whose ranks are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STEPS = 10
EXAMPLE = ["--hidden", "32", "--layers", "2", "--seq-len", "64", "--steps", str(STEPS)]

SCRIPT = """
import json, os, runpy, signal, sys
from pathlib import Path

import zeroshard

examples, deaths, plot = sys.argv[1:4]
sys.argv = ["finetune.py", *sys.argv[4:]]
sys.path.insert(0, examples)
import report

def draw(path, losses, evaluations, unit):
    Path(plot).write_text(json.dumps([losses, evaluations]))
    return True

report.save_plot = draw

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying_fsync(descriptor):
    global num_synced
    num_synced += 1
    if num_synced == 2:
        die()
    fsync(descriptor)

def dying_backward(engine, loss):
    if engine.global_step == 8:
        die()
    backward(engine, loss)

num_synced, fsync, backward = 0, os.fsync, zeroshard.Engine.backward
death = json.loads(deaths).get(os.environ["TORCHELASTIC_RESTART_COUNT"] + " " + os.environ["RANK"])
if death == "in the second save":
    os.fsync = dying_fsync
if death == "in a step":
    zeroshard.Engine.backward = dying_backward

runpy.run_path(examples + "/finetune.py", run_name="__main__")
"""


def finetune(
    folder: Path, num_ranks: int, *arguments: str, deaths: dict[str, str] | None = None
) -> tuple[list[float], list[float], str]:
    """Run the example.

    Args:
        folder: for its checkpoints, and what it draws.
        deaths: when a rank kills itself, by "<restart> <rank>".

    Returns:
        The losses and the evaluations that it draws, and what it prints.
    """
    script, plot = folder.with_suffix(".py"), folder.with_suffix(".json")
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    wrapped = [str(script), str(ROOT / "examples"), json.dumps(deaths or {}), str(plot)]
    checkpoints = ["--checkpoint-dir", str(folder), "--save-every", "3"]
    done = subprocess.run(
        [sys.executable, *torchrun, "--max-restarts=3", *wrapped, *EXAMPLE, *checkpoints, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses, evaluations = json.loads(plot.read_text())
    return losses, evaluations, done.stdout


@pytest.mark.parametrize(
    "deaths",
    [
        {"0 1": "in the second save"},
        pytest.param({"0 1": "in the second save", "1 0": "in a step"}, marks=pytest.mark.long),
    ],
    ids=["once", "twice"],
)
def test_a_run_whose_ranks_are_killed_has_the_losses_of_one_that_was_left_alone(
    tmp_path: Path, deaths: dict[str, str]
) -> None:
    pytest.importorskip("transformers")
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    auto = ["--batch-size", "2", "--resume", "auto"]
    with ThreadPoolExecutor() as pool:  # starting processes takes most of the time
        alone = pool.submit(finetune, quiet, 2, *auto)
        again = finetune(killed, 2, *auto, deaths=deaths)
    losses, evaluations, said = alone.result()
    assert len(losses) == STEPS
    assert "going on" not in said
    assert again[:2] == (losses, evaluations)
    assert again[2].count("going on after step") == len(deaths)
    assert left_in(killed) == left_in(quiet)

    if len(deaths) == 2:
        at_one_rank = finetune(killed, 1, "--batch-size", "4", "--resume", "step-6")
        assert "going on after step 6" in at_one_rank[2]
        assert at_one_rank[0][:6] == losses[:6]
        assert at_one_rank[0] == pytest.approx(losses, rel=1e-5)
        assert at_one_rank[1] == pytest.approx(evaluations, rel=1e-5)


def left_in(folder: Path) -> dict[str, Any]:
    """What is in a folder of checkpoints: each file that names one, and the files of each."""
    return {
        path.name.partition(".")[0] + ("/" if path.is_dir() else ""): (
            sorted(os.listdir(path)) if path.is_dir() else None
        )
        for path in folder.iterdir()
    }
