"""The doctor of one process, and of the ranks that torchrun starts."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.cli.main import main

ROOT = Path(__file__).parents[2]


def test_one_process_shows_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert re.search(rf"torch +{re.escape(torch.__version__)}\n", out)
    assert re.search(r"ranks on CPUs \(Gloo\) +yes\n", out)


def examine() -> str:
    """Run the doctor on a rank as torchrun has started it; return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["doctor", "--device", "cpu"]) == 0
    return printed.getvalue()


def check(text: str) -> None:
    titles = [block.splitlines()[0] for block in text.split("\n\n")]
    assert titles == ["versions", "machine", "features"]  # all ranks have the same versions


def test_rank_0_tells_for_all(ranks: Any) -> None:
    first, second = ranks(2, examine, process_group=False)
    assert not second
    check(first)


@pytest.mark.long
def test_torchrun_starts_the_doctor(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = ["-m", "zeroshard", "doctor", "--device", "cpu"]
    done = subprocess.run(
        [*command, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout)
