"""The example with pipeline, data-parallel and tensor ranks, examples/train_3d.py."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.commands import environment
from tests.ranks import Ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--steps", "4", "--seq-len", "32", "--batch-size", "8", "--microbatches", "2"]


def steps(printed: str) -> list[tuple[int, float, float]]:
    """The number, the loss and the gradient norm of each step."""
    found = re.findall(r"^step (\d+): loss ([\d.]+), gradient norm ([\d.]+)$", printed, re.MULTILINE)
    return [(int(number), float(loss), float(norm)) for number, loss, norm in found]


def check(printed: str, folder: Path, num_steps: int, num_ranks: int) -> None:
    """The steps after the checkpoint are the same in both layouts, and the model has learned."""
    *before, third, fourth, third_again, fourth_again = steps(printed)
    assert [number for number, _, _ in before] == list(range(1, num_steps + 1))
    assert before[0][1] == pytest.approx(math.log(256), abs=0.1)
    assert before[-1][1] < before[0][1] - 0.5
    for one, other in ((third, third_again), (fourth, fourth_again)):
        assert one == pytest.approx(other, abs=2e-4)  # 4 digits are printed
    assert len(re.findall(r"^ +\d+ +\d+ +\d+ +\d+ +[\d,]+ +[\d,]+$", printed, re.MULTILINE)) == num_ranks
    manifest = next((folder / "checkpoints").glob("step-*/*.json"))
    assert json.loads(manifest.read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert f"transformers reads the model: {model.num_parameters():,} parameters" in printed


def train_3d(folder: str, *arguments: str) -> str:
    """Run the example on this rank, and return the lines that it prints."""
    sys.path.insert(0, str(EXAMPLES))
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["train_3d.py", "--output", folder, *arguments])
        patch.setenv("XDG_CACHE_HOME", str(Path(folder, "cache")))
        try:
            runpy.run_path(str(EXAMPLES / "train_3d.py"), run_name="__main__")
        finally:
            sys.path.remove(str(EXAMPLES))
            sys.modules.pop("text", None)
    return printed.getvalue()


def test_two_pipeline_ranks_train_and_another_layout_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ["--pp", "2", "--dp", "1", "--tp", "1", *SMALL]
    printed = ranks(2, train_3d, str(tmp_path), *arguments, process_group=False)[0]
    check(printed, tmp_path, 4, 2)
    assert re.search(r"^ chunk 1 +1 +model\.layers\.\d", printed, re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--pp", "4", "--tp", "1", "--schedule", "zb-h1", "--stage", "1"]])
def test_one_command_starts_8_ranks(tmp_path: Path, options: list[str]) -> None:
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [sys.executable, str(EXAMPLES / "train_3d.py"), "--output", str(tmp_path), *SMALL, *options]
    ended = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    check(ended.stdout, tmp_path, 4, 8)


def test_a_batch_that_does_not_divide_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_3d(str(tmp_path), "--batch-size", "12")
    refused = capsys.readouterr().err
    assert "--batch-size: expected a multiple of 8, for 2 data-parallel ranks with 4" in refused
