"""Checkpoints and metrics in a worker of Ray Train; the long test runs Ray."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zeroshard
from tests.integrations.standin import stand_in

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(stage):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return zeroshard.initialize(model, optimizer, {"stage": stage}).engine


def step(engine):
    loss = engine(torch.ones(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def report_and_resume(folder):
    with pytest.MonkeyPatch.context() as patch:
        run, ray = stand_in(patch, folder)
        first = start(3)
        assert ray.resume(first) is None
        step(first)
        ray.report(first, {"loss": 1.0}, client_state={"note": 5})
        resumed = start(2)
        state = ray.resume(resumed)
    return run.reported, state, resumed.global_step, step(first) == step(resumed)


def test_a_worker_reports_a_folder_of_the_storage_and_goes_on_from_it(ranks, tmp_path):
    for reported, state, global_step, is_same in ranks(2, report_and_resume, str(tmp_path)):
        assert reported == [({"loss": 1.0}, str(tmp_path / "checkpoint-step-1"), "no upload")]
        assert (state, global_step, is_same) == ({"note": 5}, 1, True)
    assert (tmp_path / "checkpoint-step-1" / "latest").is_file()


def report_elsewhere(folder):
    with pytest.MonkeyPatch.context() as patch:
        _, ray = stand_in(patch, folder, filesystem=object())
        with pytest.raises(ValueError, match="expected a folder that all workers mount") as caught:
            ray.report(start(3), {})
    return str(caught.value)


def test_a_storage_that_is_no_folder_is_refused(ranks, tmp_path):
    assert "in a object" in ranks(1, report_elsewhere, "bucket/run")[0]


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
