"""`zeroshard estimate`: settings that fit, adapters, and pipelines."""

from __future__ import annotations

import importlib
import json
import re
import sys

import pytest

import zeroshard
from tests.commands import failure
from tests.commands import shown as shown_by
from zeroshard.tables import format_bytes


@pytest.fixture(autouse=True)
def own_path(monkeypatch, tmp_path):
    """Modules are found in the current directory, and not afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def shown(capsys, *arguments: object) -> str:
    return shown_by(capsys, "estimate", *arguments)


def rows_of_fits(out: str) -> list[str]:
    return [line.strip() for line in out.splitlines() if line.startswith(" stage ")]


def test_the_settings_that_fit_a_device_are_listed_best_first(capsys):
    out = shown(capsys, "13B", "--precision", "bf16", "--tokens", 8192, "--memory", "80GB", "--host", "1TiB")
    assert "8 ranks: settings that take at most 90% of 74.51 GiB, best first" in out
    first, *others = rows_of_fits(out)
    assert first.startswith("stage 1, 32-bit states, recompute")
    config = {"stage": 1, "precision": "bf16", "recompute": "unit"}
    assert format_bytes(zeroshard.estimate(13e9, 8, config, num_tokens=8192).peak) in first
    assert any("optimizer=cpu" in row for row in others)
    assert "nvme" not in out, "no disk space was given"
    assert "first without offload, then without recomputation" in " ".join(out.split())
    assert out.splitlines()[-5].startswith(" and ")


def test_settings_that_are_given_are_those_of_all_that_fit(capsys):
    given = ("--stage", 3, "--optimizer-bits", 8, "--recompute", "unit")
    asked = ("1B", "--precision", "bf16", "--tokens", 4096, *given)
    rows = rows_of_fits(shown(capsys, *asked, "--memory", "80GB", "--host", "1TiB"))
    assert rows
    assert all(row.startswith("stage 3, 8-bit states, recompute") for row in rows)
    least = shown(capsys, *asked, "--memory", "1MiB").partition("the least is")[2]
    assert "stage 3, 8-bit states" in least


def test_the_least_setting_is_told_where_none_fits(capsys):
    out = shown(capsys, "70B", "--precision", "bf16", "--tokens", 4096, "--memory", "24GiB", "--ranks", 4)
    assert "4 ranks: no setting fits into 90% of 24.00 GiB; the least is" in out
    assert "stage 3, 8-bit states, recompute" in out


def test_the_length_of_samples_and_recomputation_are_counted(capsys):
    options = ("1B", "--precision", "bf16", "--tokens", 8192, "--stage", 3)
    whole = zeroshard.estimate(1e9, 8, {"precision": "bf16"}, num_tokens=(2, 4096))
    assert format_bytes(whole.activations) in shown(capsys, *options, "--length", 4096)
    config = {"precision": "bf16", "recompute": "unit"}
    again = zeroshard.estimate(1e9, 8, config, num_tokens=8192)
    assert format_bytes(again.activations) in shown(capsys, *options, "--recompute", "unit")
    assert again.activations < whole.activations


def test_a_budget_costs_time(capsys):
    given = ("7B", "--precision", "bf16", "--stage", 3, "--tokens", 8192)
    out = shown(capsys, *given, "--recompute", "auto", "--memory-budget", "40GB")
    config = {"precision": "bf16", "recompute": "auto", "memory_budget": "40GB"}
    found = zeroshard.estimate(7e9, 8, config, num_tokens=8192)
    assert 0.97 * 40e9 < found.peak <= 40e9
    assert re.search(rf"forward and backward, longer by +{found.extra_time:.1%}", out)
    keep, unit = (
        zeroshard.estimate(7e9, 8, config | {"recompute": way, "memory_budget": None}, num_tokens=8192)
        for way in ("none", "unit")
    )
    assert keep.extra_time == 0 < found.extra_time < unit.extra_time < 1 / 3
    more = zeroshard.estimate(7e9, 8, config | {"memory_budget": 10**12}, num_tokens=8192)
    less = zeroshard.estimate(7e9, 8, config | {"memory_budget": 10**9}, num_tokens=8192)
    assert (more.peak, more.extra_time) == (keep.peak, 0)
    assert less.peak == unit.peak > 10**9


def test_a_budget_that_is_no_size_or_too_small_is_refused(capsys):
    given = ("7B", "--precision", "bf16", "--tokens", 8192, "--recompute", "auto", "--memory-budget")
    code, said = failure(capsys, "estimate", *given, "0.5")
    assert (code, "expected bytes such as 60GB, got '0.5'" in said) == (2, True)
    code, said = failure(capsys, "estimate", *given, "1GB", "--stage", 3)
    config = {"precision": "bf16", "recompute": "unit"}
    least = format_bytes(zeroshard.estimate(7e9, 8, config, num_tokens=8192).peak)
    assert code == 2
    assert f"expected at least {least}, which is taken where all units recompute, got 953.7 MiB" in said
    assert "a budget of" in shown(capsys, *given, "1GB", "--memory", "80GB")


@pytest.mark.long  # the example of the help is quick
def test_adapters_over_codes_are_estimated(capsys, tmp_path):
    importlib.import_module("peft.tuners.lora")  # the first import of what it imports may write warnings
    capsys.readouterr()
    sizes = {"hidden_size": 512, "intermediate_size": 1365, "num_hidden_layers": 8, "vocab_size": 8000}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("config.json", "--precision", "bf16", "--stage", 3, "--ranks", 4)
    out = shown(capsys, *options, "--lora", 8, "--weight-bits", 4, "--tokens", 256)
    assert re.search(r"PeftModel with [\d,]+ parameters, of which \d+ K are trained", out)
    assert "scales of codes" in out

    def gradients(text):
        [line] = [line for line in text.splitlines() if line.strip().startswith("gradients")]
        number, unit = line.split()[-2:]
        return float(number) * {"KiB": 1, "MiB": 1024}[unit]

    assert gradients(out) < gradients(shown(capsys, *options)) / 20


def test_a_package_that_is_missing_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    monkeypatch.setitem(sys.modules, "peft", None)
    code, said = failure(capsys, "estimate", "config.json", "--lora", 16)
    assert code == 2
    assert "peft" in said
