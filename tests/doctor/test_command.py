"""The doctor as a command."""

from __future__ import annotations

import re

import pytest
import torch

from zeroshard.cli.main import main


def test_one_process_shows_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert re.search(rf"torch +{re.escape(torch.__version__)}\n", out)
    assert re.search(r"ranks on CPUs \(Gloo\) +yes\n", out)
