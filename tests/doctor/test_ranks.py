"""The doctor of one process, and of the ranks that torchrun starts."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.cli.main import main


def test_one_process_shows_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert re.search(rf"torch +{re.escape(torch.__version__)}\n", out)
    assert re.search(r"ranks on CPUs \(Gloo\) +yes\n", out)


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
