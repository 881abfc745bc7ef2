"""`zeroshard estimate`: tables, models of a config, settings that fit, adapters."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest

import zeroshard
from tests.commands import failure, rows, write_llama
from tests.commands import shown as shown_by
from zeroshard.tables import format_bytes


def shown(capsys, *arguments: object) -> str:
    return shown_by(capsys, "estimate", *arguments)


def table(text: str) -> dict[str, list[str]]:
    return {name: cells for name, cells in rows(text, 3).items() if all("B" in cell for cell in cells)}


def test_estimate_shows_all_stages_side_by_side(capsys):
    out = shown(capsys, "7B", "--precision", "bf16")
    answers = [zeroshard.estimate(7e9, 8, {"stage": s, "precision": "bf16"}) for s in range(4)]
    assert table(out)["total at the peak"] == [format_bytes(answer.peak) for answer in answers]
    assert "Activations" in out
    assert "A step has one micro-batch: with more" in " ".join(out.split())
    assert max(map(len, out.splitlines())) < 80


def test_estimate_takes_ranks_bits_and_a_config(tmp_path, capsys):
    options = ("--world-size", 2, "--stage", 1, "--optimizer-bits", 8)
    expected = zeroshard.estimate(1e9, 2, {"stage": 1}, optimizer_bits=8)
    found = table(shown(capsys, "1e9", *options))
    assert found["optimizer states"] == [format_bytes(expected.optimizer)]
    (tmp_path / "config.toml").write_text("stage = 2\ngradient_accumulation_steps = 4\n")
    config = {"stage": 2, "gradient_accumulation_steps": 4}
    sent = format_bytes(zeroshard.estimate(1e9, 8, config).wire_bytes_per_step)
    found = table(shown(capsys, "1e9", "--config", tmp_path / "config.toml"))
    assert found["sent in a step"] == [sent]
    assert "one micro-batch" not in shown(capsys, "1e9", "--config", tmp_path / "config.toml")


def test_estimate_of_a_quantized_model_counts_codes_and_scales(tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = write_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": how.to_dict()}))
    out = shown(capsys, tmp_path, "--stage", 3)
    assert f"with {sum(p.numel() for p in model.parameters()):,} parameters" in out
    expected = zeroshard.estimate(zeroshard.quantize(model, how), 8)
    assert table(out)["parameters"] == [format_bytes(expected.parameters)]
    assert table(out)["scales of codes"] == [format_bytes(expected.scales)]
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, said = failure(capsys, "estimate", tmp_path)
    assert code == 2
    assert "quantized by bitsandbytes, got a GPTQConfig" in said


def test_estimate_of_a_config_is_that_of_its_model(tmp_path, capsys):
    model = write_llama(tmp_path)
    expected = zeroshard.estimate(model, 8, {"precision": "bf16"})
    for name in (".", "config.json"):
        out = shown(capsys, tmp_path / name, "--precision", "bf16", "--stage", 3)
        assert table(out)["total at the peak"] == [format_bytes(expected.peak)]
        assert table(out)["parameters"] == [format_bytes(expected.parameters)]
        assert f"LlamaForCausalLM with {sum(p.numel() for p in model.parameters()):,} parameters" in out


def rows_of_fits(out: str) -> list[str]:
    return [line.strip() for line in out.splitlines() if line.startswith(" stage ")]


def test_the_settings_that_fit_a_device_are_listed_best_first(capsys):
    out = shown(capsys, "13B", "--precision", "bf16", "--tokens", 8192, "--memory", "79GiB", "--host", "1TiB")
    assert "8 ranks: settings within 90% of 79.00 GiB and of 1.00 TiB of a host, best first" in out
    assert max(map(len, out.splitlines())) < 80
    rounded, first, *others = rows_of_fits(out)
    assert rounded.startswith("stage 3, 8-bit states, bf16 main ")
    assert first.startswith("stage 1, 32-bit states, recompute")
    config = {"stage": 1, "precision": "bf16", "recompute": "unit"}
    assert format_bytes(zeroshard.estimate(13e9, 8, config, num_tokens=8192).peak) in first
    assert any("optimizer=cpu" in row for row in others)
    assert "nvme" not in out, "no disk space was given"
    assert "first without offload, then without recomputation" in " ".join(out.split())
    assert re.search(r"^ and \d+ more$", out, re.MULTILINE)


def test_a_tenth_of_the_host_is_left_and_bf16_main_parameters_take_least(capsys):
    precision = {"param_dtype": "bf16", "main_dtype": "bf16"}
    config = {"stage": 3, "precision": precision, "recompute": "unit", "offload": {"optimizer": "cpu"}}
    found = zeroshard.estimate(13e9, 1, config, optimizer_bits=8, num_tokens=4096)
    memory, host = (math.ceil(num_bytes / 0.9) for num_bytes in (found.peak, found.host))
    given = ("13B", "--ranks", 1, "--precision", "bf16", "--tokens", 4096, "--stage", 3, "--memory", memory)
    (first, *_) = rows_of_fits(shown(capsys, *given, "--host", host))
    assert first.startswith("stage 3, 8-bit states, bf16 main parameters,")
    assert "no setting fits" in shown(capsys, *given, "--host", found.host)


def test_settings_that_are_given_are_those_of_all_that_fit(capsys):
    given = ("--stage", 3, "--optimizer-bits", 8, "--recompute", "unit")
    asked = ("1B", "--precision", "bf16", "--tokens", 4096, *given)
    out = shown(capsys, *asked, "--memory", "80GB")
    assert len(rows_of_fits(out)) == out.count("stage 3, 8-bit states,") == out.count("recompute") == 2
    least = shown(capsys, *asked, "--memory", "1MiB").partition("the least is")[2]
    assert "stage 3, 8-bit states" in least


def test_the_least_setting_is_told_where_none_fits(capsys):
    out = shown(capsys, "70B", "--precision", "bf16", "--tokens", 4096, "--memory", "24GiB", "--ranks", 4)
    assert "4 ranks: no setting fits into 90% of 24.00 GiB; the least is" in out
    assert "stage 3, 8-bit states, bf16 main parameters, recompute" in out


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
    (drawn,) = re.findall(r"\ncompute  \|(F+[Bf]+)\|\n", out)
    assert drawn.count("B") > drawn.count("F") > drawn.count("f") > 0
    over_link = shown(capsys, *given, "--recompute", "auto", "--memory-budget", "30GB", "--cluster", "8xH100")
    assert re.search(r"\ncompute  \|F+B[fB]+\|\nlink +\| *>[> ]+<[< ]+\|", over_link)
    less = zeroshard.estimate(7e9, 8, config | {"memory_budget": "30GB"}, num_tokens=8192)
    assert float(re.search(r"longer by +([\d.]+)%", over_link)[1]) < 100 * less.extra_time - 1


def test_a_budget_that_is_no_size_or_too_small_is_refused(capsys):
    given = ("7B", "--precision", "bf16", "--tokens", 8192, "--recompute", "auto", "--memory-budget")
    code, said = failure(capsys, "estimate", *given, "0.5")
    assert (code, "expected bytes such as 60GB" in said) == (2, True)
    code, said = failure(capsys, "estimate", *given, "1GB", "--stage", 3)
    config = {"precision": "bf16", "recompute": "unit"}
    least = f"{math.ceil(zeroshard.estimate(7e9, 8, config, num_tokens=8192).peak / (1 << 20))}MiB"
    assert code == 2
    assert f"expected at least {least}, the least of all stages, got 953.7 MiB" in said
    assert "longer by" in shown(capsys, *given, least, "--stage", 3)
    assert "a budget of" in shown(capsys, *given, "1GB", "--memory", "80GB")


def test_a_package_that_is_missing_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    monkeypatch.setitem(sys.modules, "peft", None)
    code, said = failure(capsys, "estimate", tmp_path, "--lora", 16)
    assert code == 2
    assert "pip install peft" in said
