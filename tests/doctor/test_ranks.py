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


def test_a_folder_that_is_not_there_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--disk", "/nowhere"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "/nowhere" in err


def examine(folder: str) -> str:
    """Run the doctor on a rank as torchrun has started it; return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["doctor", "--device", "cpu", "--disk", folder]) == 0
    return printed.getvalue()


def check(text: str, folder: Path) -> None:
    blocks = text.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [
        "versions",
        "machine",
        "features",
        f"disk of {folder}, 256 MiB a rank, all at once",
    ]
    assert [line.split()[0] for line in blocks[3].splitlines()[-2:]] == ["0", "1"]


def test_rank_0_tells_for_all(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, examine, str(tmp_path), process_group=False)
    assert not second
    check(first, tmp_path)


@pytest.mark.long
def test_torchrun_starts_the_doctor(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = ["-m", "zeroshard", "doctor", "--device", "cpu", "--disk", str(tmp_path)]
    done = subprocess.run(
        [*command, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, tmp_path)
