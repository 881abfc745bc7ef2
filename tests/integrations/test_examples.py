"""The examples with other libraries train the small Llama, with the same losses."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = ("llama", "text")
"""Modules beside the examples, which other tests import by other names."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The folder of the text, which is written once."""
    return str(tmp_path_factory.mktemp("cache"))


def run(name, folder, *arguments):
    """Run an example on this rank; return the lines that it prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setenv("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        torch.manual_seed(0)  # as in a process of its own
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            for module in OWN:
                sys.modules.pop(module, None)
    return printed.getvalue()


def numbers(printed):
    return [float(number) for number in re.findall(r"^step \d+: \w+ ([\d.]+)$", printed, re.MULTILINE)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_lightning_and_a_loader_of_the_user_print_the_same_losses(ranks, cache):
    pytest.importorskip("lightning")
    names = ("train_lightning", "train_loader")
    found = [numbers(ranks(2, run, name, cache, "--steps", "11", process_group=False)[0]) for name in names]
    assert found[0] == found[1]
    first, last = found[0]
    assert first == pytest.approx(5.546, abs=0.1)  # ln 256
    assert last < first - 0.5


@pytest.mark.long
def test_the_loader_of_the_user_goes_on_from_a_checkpoint(ranks, cache, tmp_path):
    def losses(folder, steps):
        options = ("--steps", str(steps), "--checkpoint-dir", str(tmp_path / folder))
        return numbers(ranks(2, run, "train_loader", cache, *options, process_group=False)[0])

    whole = losses("whole", 21)
    losses("cut", 11)
    assert losses("cut", 21) == whole[2:]


@pytest.mark.long
def test_the_loop_of_samples_learns_what_is_rewarded(ranks, cache):
    printed = ranks(2, run, "train_rl", cache, "--steps", "16", process_group=False)[0]
    rewards = numbers(printed)
    assert rewards[0] == pytest.approx(26 / 256, abs=0.03)
    assert rewards[-1] > 2 * rewards[0]


@pytest.mark.long
def test_ray_trains_on_two_workers_and_starts_them_again_after_one_has_died(tmp_path):
    pytest.importorskip("ray.train.torch")
    quiet = environment(XDG_CACHE_HOME=str(tmp_path), RAY_USAGE_STATS_ENABLED="0")
    command = [sys.executable, str(EXAMPLES / "train_ray.py"), "--storage", str(tmp_path / "runs")]
    ended = subprocess.run(
        [*command, "--steps", "21", "--fail-at", "15"],
        env=quiet, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
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
