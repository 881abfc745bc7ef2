"""The examples other than the main job: several axes of ranks, other libraries, a loop of samples."""

import contextlib
import importlib
import io
import itertools
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

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
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        patch.setenv("XDG_CACHE_HOME", folder)
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            for module in OWN:
                sys.modules.pop(module, None)
    return printed.getvalue()


def launched(name, folder, *arguments):
    """Run an example that starts ranks by itself; return the lines that it prints."""
    env = environment(XDG_CACHE_HOME=str(folder / "cache"), RAY_USAGE_STATS_ENABLED="0")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    ended = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


# ------------------------------------------------------------------------------------- several axes of ranks

SMALL = ["--steps", "4", "--seq-len", "32", "--batch-size", "8", "--microbatches", "2"]


def check(printed, folder, num_ranks):
    """The steps after the checkpoint are the same in both layouts, and the model has learned."""
    found = re.findall(r"^step (\d+): loss ([\d.]+), gradient norm ([\d.]+)$", printed, re.MULTILINE)
    *before, third, fourth, third_again, fourth_again = [tuple(map(float, step)) for step in found]
    assert [number for number, _, _ in before] == [1, 2, 3, 4]
    assert before[0][1] == pytest.approx(math.log(256), abs=0.1)
    assert before[-1][1] < before[0][1] - 0.5
    for one, other in ((third, third_again), (fourth, fourth_again)):
        assert one == pytest.approx(other, abs=2e-4)  # 4 digits are printed
    assert len(re.findall(r"^ +\d+ +\d+ +\d+ +\d+ +[\d,]+ +[\d,]+$", printed, re.MULTILINE)) == num_ranks
    manifest = next((folder / "checkpoints").glob("step-*/*.json"))
    assert json.loads(manifest.read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert f"transformers reads the model: {model.num_parameters():,} parameters" in printed


def test_two_pipeline_ranks_train_and_another_layout_goes_on(ranks, cache, tmp_path):
    arguments = ["--output", tmp_path, "--pp", "2", "--dp", "1", "--tp", "1", *SMALL]
    printed = ranks(2, run, "train_3d", cache, *arguments, process_group=False)[0]
    check(printed, tmp_path, 2)
    assert re.search(r"^ chunk 1 +1 +model\.layers\.\d", printed, re.MULTILINE)


@pytest.mark.long(seconds=30)
def test_one_command_starts_all_ranks(tmp_path):
    check(launched("train_3d", tmp_path, "--output", tmp_path, "--dp", "1", "--tp", "1", *SMALL), tmp_path, 2)


def test_a_batch_that_does_not_divide_is_refused_before_ranks_start(cache, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("train_3d", cache, "--output", tmp_path, "--batch-size", "12")
    refused = capsys.readouterr().err
    assert "--batch-size: expected a multiple of 8, for 2 data-parallel ranks with 4" in refused


# ------------------------------------------------------------------------------------------ other libraries


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


@pytest.fixture
def few_bit(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("few_bit")
    monkeypatch.setattr(example, "POINTS", 500)  # a sixteenth of the time
    yield example
    for module in ("few_bit", *OWN):
        sys.modules.pop(module, None)


def test_levels_of_a_derivative_are_the_papers(few_bit, monkeypatch):
    """Those of GELU with 3 bits in SkoltechAI's fewbit, the authors' package."""
    bounds = [-2.39798704, -0.711248159, -0.326290283, 0.0, 0.326182064, 0.710855860, 2.39811567]
    values = [-0.00260009, -0.08883533, 0.1251944, 0.37204148, 0.6277958, 0.87466175, 1.08880716, 1.00259936]
    with monkeypatch.context() as patch:
        patch.setattr(few_bit, "POINTS", 2000)
        levels = few_bit.best_levels(F.gelu, 3)
    assert levels.bounds.tolist() == pytest.approx(bounds, abs=0.01)
    assert levels.values.tolist() == pytest.approx(values, abs=2e-3)
    for function in (F.gelu, F.silu):
        errors = [few_bit.best_levels(function, bits).error for bits in range(1, 5)]
        assert all(more > 2.5 * less > 0 for more, less in itertools.pairwise(errors))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bits_of_an_input_are_kept_and_its_gradient_is_a_level(few_bit, bits):
    module, saved = few_bit.FewBit(F.silu, bits), []
    x = torch.randn(7, 9, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        output = module(x)
    assert torch.equal(output, F.silu(x))
    assert sum(one.nbytes for one in saved) == bits * 8  # of 63 elements
    output.sum().backward()
    expected = module.values[torch.bucketize(x.detach(), module.bounds)]
    assert torch.equal(x.grad, expected)
    assert len(module.values) == 2**bits


@pytest.mark.long
def test_a_model_with_few_bits_learns_at_each_stage(ranks, cache):
    found = []
    for stage in (0, 3):
        options = ("--steps", "31", "--bits", "2", "--stage", str(stage))
        found.append(numbers(ranks(2, run, "few_bit", cache, *options, process_group=False)[0]))
    assert all(losses == found[0] for losses in found)
    assert found[0][-1] < found[0][0] - 0.5


@pytest.mark.long(seconds=100)
def test_ray_trains_on_two_workers_and_starts_them_again_after_one_has_died(tmp_path):
    pytest.importorskip("ray.train.torch")
    options = ("--storage", tmp_path / "runs", "--steps", "21", "--fail-at", "15")
    printed = launched("train_ray", tmp_path, *options)
    match = re.search(r"last: \{'step': 20, 'loss': ([\d.]+), 'first': (\d+)\}", printed)
    assert match is not None, printed[-3000:]
    assert float(match[1]) < 4
    assert int(match[2]) > 0, "expected the workers to go on from a checkpoint"
    (newest,) = re.findall(r"^checkpoint: (.*)$", printed, re.MULTILINE)
    assert newest == str(tmp_path / "runs" / "zeroshard" / "checkpoint-step-21")
    kept = sorted(path.name for path in Path(newest).parent.glob("checkpoint-step-*"))
    assert kept == ["checkpoint-step-11", "checkpoint-step-21"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["switch", "sparse_attention"])
def test_a_model_of_experts_and_one_with_sparse_attention_learn(name, cache):
    """tests/examples/test_models.py compares them with plain PyTorch."""
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(name, cache, "--steps", 20))]
    assert losses[-1] < losses[0]
