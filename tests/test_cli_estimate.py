"""`zeroshard estimate`: settings that fit, import paths, and pipelines."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

import zeroshard
from tests.commands import failure
from tests.commands import shown as shown_by
from zeroshard.cli import planning
from zeroshard.tables import format_bytes


@pytest.fixture(autouse=True)
def own_path(monkeypatch, tmp_path):
    """Modules are found in the current directory, and not afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def shown(capsys, *arguments: object) -> str:
    return shown_by(capsys, "estimate", *arguments)


def refused(capsys, *arguments: object) -> str:
    code, err = failure(capsys, "estimate", *arguments)
    assert code == 2
    return err


def rows_of_fits(out: str) -> list[str]:
    return [line.strip() for line in out.splitlines() if line.startswith(" stage ")]


def test_the_settings_that_fit_a_device_are_listed_best_first(capsys):
    out = shown(capsys, "13B", "--precision", "bf16", "--tokens", 8192, "--gpu", "h100", "--host", "1TiB")
    assert "8 ranks: settings that take at most 90% of 74.51 GiB, best first" in out
    first, *others = rows_of_fits(out)
    assert first.startswith("stage 1, 32-bit states, recompute")
    assert first.endswith("a forward more")
    config = {"stage": 1, "precision": "bf16", "recompute": "unit"}
    assert format_bytes(zeroshard.estimate(13e9, 8, config, num_tokens=8192).peak) in first
    assert any("optimizer=cpu" in row and "states from the host" in row for row in others)
    assert "first without offload, then without recomputation" in " ".join(out.split())
    assert out.splitlines()[-5].startswith(" and ")


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("--stage", 2, "stage 2,"),
        ("--stage", 3, "stage 3,"),
        ("--optimizer-bits", 8, "8-bit states"),
        ("--optimizer-bits", 32, "32-bit states"),
        ("--recompute", "unit", "recompute"),
    ],
)
def test_a_setting_that_is_given_is_that_of_all_that_fit(capsys, option, value, part):
    asked = ("1B", "--precision", "bf16", "--tokens", 4096, option, value)
    rows = rows_of_fits(shown(capsys, *asked, "--gpu", "h100", "--host", "1TiB"))
    assert rows
    assert all(part in row for row in rows)
    if option != "--recompute":  # a row names it only where it is on
        assert part in shown(capsys, *asked, "--memory", "1MiB").partition("the least is")[2]


def test_the_least_setting_is_told_where_none_fits(capsys):
    out = shown(capsys, "70B", "--precision", "bf16", "--tokens", 4096, "--memory", "24GiB", "--ranks", "4,8")
    assert out.count("no setting fits into 90% of 24.00 GiB; the least is") == 2
    assert "stage 3, 8-bit states, recompute" in out


def test_adapters_over_codes_are_estimated(capsys):
    importlib.import_module("peft.tuners.lora")  # the first import of what it imports may write warnings
    capsys.readouterr()
    options = ("300M", "--precision", "bf16", "--stage", 3, "--ranks", 4)
    out = shown(capsys, *options, "--lora", 8, "--weight-bits", 4, "--tokens", 256)
    (number,) = re.findall(r"PeftModel with ([\d,]+) parameters", out)
    assert int(number.replace(",", "")) == pytest.approx(3e8, rel=0.05)  # a Llama of about that size
    assert re.search(r"of which \d\.\d\d M are trained", out)
    assert "scales of codes" in out
    found = {line.split("  ")[0].strip(): line.split("  ")[-1].strip() for line in out.splitlines()}
    whole = zeroshard.estimate(3e8, 4, {"precision": "bf16"})
    assert found["gradients"].endswith("MiB")
    assert float(found["gradients"].split()[0]) < whole.gradients / (1 << 20) / 20


@pytest.mark.parametrize(
    ("option", "missing", "extras"),
    [
        (("--lora", 16), "peft", "hf,lora"),
        (("--lora", 16), "transformers", "hf,lora"),
        (("--weight-bits", 4), "bitsandbytes", "hf,eightbit"),
    ],
)
def test_a_package_that_is_missing_is_told_before_any_work(capsys, monkeypatch, option, missing, extras):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(planning, "_model", lambda _: pytest.fail("a model was built"))
    told = refused(capsys, "70B", *option)
    assert missing in told
    assert told.strip().endswith(f"pip install zeroshard[{extras}]")


def test_a_model_is_built_by_a_function_of_the_user(capsys, tmp_path):
    text = "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(1000, 1000))\n"
    (tmp_path / "own_models.py").write_text(text + "class Holder:\n    small = nn.Linear(10, 10)\n")
    out = shown(capsys, "own_models:build", "--ranks", 1)
    assert "Sequential with 1,001,000 parameters" in out
    assert "Linear with 110 parameters" in shown(capsys, "own_models:Holder.small", "--ranks", 1)
    assert "no_such" in refused(capsys, "no_such:build")
    assert "AttributeError" in refused(capsys, "own_models:other")
    assert "expected a function that returns a model, got Holder" in refused(capsys, "own_models:Holder")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("7B", "--gpu", "h10"), "expected a device among v100, t4, "),
        (("7B", "--tokens", "100", "--length", "3"), "expected a divisor of the 100 tokens, got 3"),
        (("7B", "--host", "1TiB"), "--host needs --gpu or --memory"),
        (("7B", "--gpu", "h100", "--nvme", "1TiB"), "--nvme needs --host"),
        (("7B", "--gpu", "h100", "--ranks-per-node", "4"), "--ranks-per-node needs --host"),
        (
            ("7B", "--gpu", "h100", "--host", "1GiB", "--ranks-per-node", "0"),
            "--ranks-per-node: expected an integer >= 1, got 0",
        ),
        (("7B", "--length", "4096"), "--length needs --tokens"),
        (("7B", "--attention", "eager"), "--attention needs --tokens"),
        (("7B", "--tokens", "-1"), "num_tokens: expected an integer >= 0, got -1"),
        (("7B", "--pp", "3"), "mesh.pp=3"),
        (("7B", "--pp", "64", "--ranks", "64"), "expected at most 31 chunks"),
    ],
)
def test_impossible_arguments_are_refused_in_one_line(capsys, arguments, expected):
    assert expected in refused(capsys, *arguments)
