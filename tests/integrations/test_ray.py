"""The example with Ray Train trains, and its workers go on from a checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
def test_ray_trains_on_two_workers_and_starts_them_again_after_one_has_died(tmp_path):
    pytest.importorskip("ray.train.torch")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    command = [sys.executable, str(EXAMPLES / "train_ray.py"), "--storage", str(tmp_path / "runs")]
    ended = subprocess.run(
        [*command, "--steps", "21", "--fail-at", "15"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    match = re.search(r"last: \{'step': 20, 'loss': ([\d.]+), 'first': (\d+)\}", ended.stdout)
    assert match is not None, ended.stdout[-3000:]
    assert float(match[1]) < 4
    assert int(match[2]) > 0, "expected the workers to go on from a checkpoint"
    (newest,) = re.findall(r"^checkpoint: (.*)$", ended.stdout, re.MULTILINE)
    assert newest == str(tmp_path / "runs" / "zeroshard" / "checkpoint-step-21")
    assert sorted(path.name for path in Path(newest).parent.glob("checkpoint-step-*")) == [
        "checkpoint-step-11",
        "checkpoint-step-21",
    ]
