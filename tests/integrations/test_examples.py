"""The examples with other libraries train the small Llama, with the same losses."""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

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


def test_the_loop_of_samples_learns_what_is_rewarded(ranks, cache):
    printed = ranks(2, run, "train_rl", cache, "--steps", "16", process_group=False)[0]
    rewards = numbers(printed)
    assert rewards[0] == pytest.approx(26 / 256, abs=0.03)
    assert rewards[-1] > 2 * rewards[0]
