"""Ranks that are killed while they save; `make kill-trials` has many more."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.kill import Trial

NUM_TRIALS, FIRST = 4, 2


@pytest.mark.long
@pytest.mark.parametrize("first", [FIRST, pytest.param(FIRST + 2, marks=pytest.mark.long)])
def test_what_is_left_of_a_save_whose_ranks_were_killed_is_a_whole_checkpoint(first):
    command = [
        sys.executable,
        "-m",
        "tests.checkpoint.kill",
        "--trials",
        str(NUM_TRIALS // 2),
        "--first",
        str(first),
    ]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("option", ["blocking", "kills_all", "tag", "victim", "call"])
def test_the_trials_of_the_suite_are_of_different_kinds(option):
    trials = [Trial.draw(seed) for seed in range(FIRST, FIRST + NUM_TRIALS)]
    assert len({getattr(trial, option) for trial in trials}) > 1
