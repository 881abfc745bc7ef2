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
from unittest import mock

import pytest
import torch

from zeroshard.cli import doctor
from zeroshard.cli.doctor import ROUNDS, measure_bandwidth, measured
from zeroshard.cli.main import main
from zeroshard.comm.counter import Counter
from zeroshard.comm.mesh import open_world

ROOT = Path(__file__).parents[2]


def measure() -> tuple[list[dict[str, str]], dict[str, int]]:
    """Measure small buffers; return the result and the bytes that this rank has sent."""
    counter = Counter()
    world = open_world(torch.device("cpu"), counter, 30.0)
    return list(measure_bandwidth(world, (1200, 2400))), counter.bytes_sent


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_are_timed_on_all_ranks(ranks: Any, num_ranks: int) -> None:
    results = ranks(num_ranks, measure)
    for found, sent in results:
        assert [(speed["collective"], speed["bytes"]) for speed in found] == [
            ("all-gather", "1.2 KiB"),
            ("reduce-scatter", "1.2 KiB"),
            ("all-gather", "2.3 KiB"),
            ("reduce-scatter", "2.3 KiB"),
            ("agreement of a step", "0 B"),
        ]
        rounds = ROUNDS + 1
        assert sent["all_gather"] == rounds * 3600 * (num_ranks - 1) // num_ranks
        assert found == results[0][0]  # all have the times of the slowest one


def test_the_rate_is_what_a_rank_sends_in_the_time_of_the_slowest_one(ranks: Any) -> None:
    assert ranks(2, rate_of_a_known_time) == [{"rate": "0.25 GB/s", "time": "2.000 ms"}] * 2


def rate_of_a_known_time() -> dict[str, str]:
    world = open_world(torch.device("cpu"), Counter(), 30.0)
    seconds = 0.002 if world.rank else 0.001
    with mock.patch.object(doctor, "median", return_value=seconds):
        row = measured(world, "all-gather", 1_000_000, lambda: None)
    return {name: row[name] for name in ("rate", "time")}


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
        "collectives of 2 ranks on cpu; each rank sends at this rate",
    ]
    assert [line.split()[0] for line in blocks[3].splitlines()[-2:]] == ["0", "1"]
    assert len(blocks[4].splitlines()) == 3 + 7


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
