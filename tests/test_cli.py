"""The command line: what it shows, and how it ends."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.commands import examples, failure, rows, shown
from tests.distributed.models import Tiny
from tests.distributed.training import build, square_loss, start, step, token_loss
from zeroshard.cli.main import main
from zeroshard.cli.options import COMMANDS, parse_model
from zeroshard.plan.arrangement import Arrangement
from zeroshard.tables import format_bytes
from zeroshard.version import installed_version

ROOT = Path(__file__).parents[1]


def test_version_is_that_of_the_installed_package():
    command = [sys.executable, "-m", "zeroshard", "--version"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == f"zeroshard {installed_version()}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert installed_version() in (project["version"], "not installed")


def save(folder: str) -> None:
    engine, optimizer = start(Tiny(), stage=2, clip_grad_norm=1.0)
    for number in range(2):
        engine.backward(square_loss(engine, number))
        engine.step()
    engine.save_checkpoint(folder, "first")
    engine.save_checkpoint(folder, "second")
    tied, optimizer = start(build("tied GPT"), "SGD")
    step(tied, optimizer, token_loss, 0)
    tied.save_checkpoint(Path(folder, "tied"))


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks(2, save, str(folder))
    return folder


def test_inspect_tells_the_origin_then_every_tensor_then_that_it_is_intact(folder, capsys):
    summary, totals, tensors, verdict = shown(capsys, "inspect", folder).split("\n\n")
    model = Tiny()
    count, numel = len(list(model.parameters())), sum(p.numel() for p in model.parameters())
    for line in (
        f"directory: {folder / 'second.0'}",
        "step: 2 skipped steps: 0 stage: 2 ",
        f"model: Tiny num params: {numel:,} optimizer: AdamW",
        f"zeroshard {installed_version()}",
        f"torch {torch.__version__}",
        "num_ranks 2",
    ):
        assert line in " ".join(summary.split())
    seconds = (folder / "second.0" / "zeroshard.json").stat().st_mtime
    assert f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC" in summary
    found = rows(totals, 3)
    assert found["parameter"] == ["float32", str(count), f"{numel:,}", f"{numel * 4 / 1024:.1f} KiB"]
    assert found["total"] == ["float32", str(3 * count), f"{3 * numel:,}", f"{numel * 12 / 1024:.1f} KiB"]
    found = rows(tensors, 3)
    for name, parameter in model.named_parameters():
        cells = ["float32", "x".join(map(str, parameter.shape)) or "scalar", format_bytes(parameter.nbytes)]
        assert found[name] == ["parameter", *cells]
        for key in ("exp_avg", "exp_avg_sq"):
            assert found[f"optimizer/{name}/{key}"] == ["optimizer state", *cells]
    names = [name for name, (kind, *_) in found.items() if kind == "parameter"]
    assert names == [name for name, _ in model.named_parameters()]
    assert verdict == "intact: all files are there and as they were written\n"


def test_inspect_tells_programs_the_same_in_json(folder, capsys):
    found = json.loads(shown(capsys, "inspect", folder / "first", "--json"))
    assert (found["step"], found["stage"], found["optimizer"], found["verified"]) == (2, 2, "AdamW", True)
    weights = {name: tensor for name, tensor in found["tensors"].items() if tensor["kind"] == "parameter"}
    expected = {name: (list(p.shape), p.nbytes) for name, p in Tiny().named_parameters()}
    assert {name: (tensor["shape"], tensor["bytes"]) for name, tensor in weights.items()} == expected
    unverified = json.loads(shown(capsys, "inspect", folder / "first", "--json", "--no-verify"))
    assert unverified == found | {"verified": False}


def test_wrong_arguments_end_with_2_and_one_line(folder, tmp_path, capsys):
    for arguments, expected in (
        ((), "COMMAND"),
        (("inspekt",), "inspekt"),
        (("inspect", tmp_path / "none"), "none"),
        (("inspect", tmp_path), "expected a checkpoint"),
        (("inspect", folder / "third"), "third"),
        (("export", folder, tmp_path / "out", "--dtype", "int8"), "int8"),
        (("export", folder, tmp_path / "out", "--max-shard-size", "5 apples"), "5 apples"),
        (("export", folder), "DIR"),
        (("estimate",), "MODEL"),
        (("estimate", "7X"), "such as 7B"),
        (("estimate", "0"), "a whole number above 0"),
        (("estimate", "1.5"), "a whole number above 0"),
        (("estimate", "9000T"), "a number of 1,048,576 to"),
        (("estimate", "7e9", "--ranks", "0"), "got 0"),
        (("estimate", "7e9", "--ranks", "2,4"), "--ranks"),
        (("estimate", "7e9", "--stage", "9"), "stage"),
        (("estimate", "7e9", "--optimizer-bits", "4"), "optimizer-bits"),
        (("estimate", "7e9", "--precision", "int8"), "int8"),
        (("estimate", "7e9", "--config", "a.toml", "--stage", "1"), "leave out --stage, --precision"),
        (("estimate", "7B", "--tokens", 100, "--length", 3), "expected a divisor of the 100 tokens, got 3"),
        (("estimate", "7B", "--host", "1TiB"), "--host needs --memory"),
        (("estimate", "7B", "--memory", "80GB", "--nvme", "1TiB"), "--nvme needs --memory and --host"),
        (("estimate", "7B", "--length", 4096), "--length needs --tokens"),
        (("estimate", "7B", "--memory-budget", "9GB"), "--memory-budget needs --tokens and --recompute auto"),
        (("estimate", "7B", "--tokens", -1), "num_tokens: expected an integer >= 0, got"),
        (("estimate", "7B", "--pp", 3), "mesh.pp=3"),
        (("estimate", "7B", "--pp", 4, "--tokens", 4096), "expected mesh.pp=1 for activations, got 4"),
        (("estimate", "7B", "--pp", 4), "mesh.pp > 1: expected a model"),
        (("estimate", "7B", "--lora", 8), "expected the config.json of a model, got a number"),
        (("estimate", "7B", "--weight-bits", 8), "expected the config.json of a model, got a number"),
        (("mesh",), "--ranks"),
        (("mesh", "--ranks", "many"), "'many'"),
        (("mesh", "--ranks", 0), "num_ranks: expected at least 1 rank, got 0"),
        (("mesh", "--ranks", 10**12), "--ranks: expected at most 4,096, got 1,000,000,000,000"),
        (("mesh", "--ranks", 8, "--tp", 0), "config key 'mesh.tp': expected an integer >= 1, got 0"),
        (("mesh", "--ranks", 8, "--shard-group-size", 0), "config key 'shard_group_size'"),
        (
            ("mesh", "--ranks", 32, "--tp", 4, "--shard-group-size", 3),
            "32 rank(s) cannot be arranged with mesh.tp=4, shard_group_size=3: expected a multiple of 12",
        ),
        (("estimate", tmp_path), "config.json"),
        (("estimate", folder / "second.0" / "zeroshard.json"), "transformers builds no model of it"),
    ):
        code, said = failure(capsys, *arguments)
        assert code == 2, arguments
        assert expected in said
    assert not (tmp_path / "out").exists()


def test_what_is_damaged_ends_with_1_and_the_name_of_the_file(folder, capsys):
    directory = folder / "first.0"
    file = next(directory.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    shown(capsys, "inspect", folder / "first", "--no-verify")
    manifest = directory / "zeroshard.json"
    of_another_step = manifest.read_bytes().replace(b'"global_step": 2', b'"global_step": 3')
    assert of_another_step != manifest.read_bytes()
    contents = (file, content), (file, content[:-1]), (manifest, of_another_step), (manifest, b"{}")
    for damaged, new in contents:
        damaged.write_bytes(new)
        code, said = failure(capsys, "inspect", folder / "first", prints=True)
        assert code == 1
        assert str(damaged) in said


@pytest.mark.parametrize(("num_ranks", "pp", "tp", "size"), [(32, 4, 4, None), (24, 1, 2, 3)])
def test_each_rank_of_a_mesh_has_a_line_with_its_place_on_each_axis(capsys, num_ranks, pp, tp, size):
    options = () if size is None else ("--shard-group-size", size)
    title, columns, _, *found = shown(
        capsys, "mesh", "--ranks", num_ranks, "--tp", tp, "--pp", pp, *options
    ).splitlines()
    arrangement = Arrangement(num_ranks, pp, tp, size)
    sizes = arrangement.sizes._asdict()
    assert title.endswith(": " + " x ".join(f"{axis} {number}" for axis, number in sizes.items()))
    assert columns.split() == ["rank", *sizes]
    expected = [[rank, *arrangement.coordinates(rank)] for rank in range(num_ranks)]
    assert [list(map(int, row.split())) for row in found] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7e9", 7 * 10**9),
        ("135_000_000", 135_000_000),
        ("135,000,000", 135_000_000),
        ("1.235B", 1_235_000_000),
        ("1T", 10**12),
        ("2.5k", 2500),
    ],
)
def test_numbers_of_parameters_are_read_as_people_write_them(text, expected):
    assert parse_model(text) == expected


def table(text: str) -> dict[str, list[str]]:
    return {name: cells for name, cells in rows(text, 3).items() if all("B" in cell for cell in cells)}


def test_estimate_shows_all_stages_side_by_side(capsys):
    out = shown(capsys, "estimate", "7B", "--precision", "bf16")
    answers = [zeroshard.estimate(7e9, 8, {"stage": s, "precision": "bf16"}) for s in range(4)]
    assert table(out)["total at the peak"] == [format_bytes(answer.peak) for answer in answers]
    assert "Activations" in out
    assert max(map(len, out.splitlines())) < 80


def test_estimate_takes_ranks_bits_and_a_config(tmp_path, capsys):
    options = ("--world-size", 2, "--stage", 1, "--optimizer-bits", 8)
    expected = zeroshard.estimate(1e9, 2, {"stage": 1}, optimizer_bits=8)
    found = table(shown(capsys, "estimate", "1e9", *options))
    assert found["optimizer states"] == [format_bytes(expected.optimizer)]
    (tmp_path / "config.toml").write_text("stage = 2\ngradient_accumulation_steps = 4\n")
    config = {"stage": 2, "gradient_accumulation_steps": 4}
    sent = format_bytes(zeroshard.estimate(1e9, 8, config).wire_bytes_per_step)
    found = table(shown(capsys, "estimate", "1e9", "--config", tmp_path / "config.toml"))
    assert found["sent in a step"] == [sent]


def write_config(folder: Path) -> nn.Module:
    """Write the config of a small Llama, and return the model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(folder)
    return model.float()


def test_estimate_of_a_quantized_model_counts_codes_and_scales(tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = write_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": how.to_dict()}))
    out = shown(capsys, "estimate", tmp_path, "--stage", 3)
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
    model = write_config(tmp_path)
    expected = zeroshard.estimate(model, 8, {"precision": "bf16"})
    for name in (".", "config.json"):
        out = shown(capsys, "estimate", tmp_path / name, "--precision", "bf16", "--stage", 3)
        assert table(out)["total at the peak"] == [format_bytes(expected.peak)]
        assert table(out)["parameters"] == [format_bytes(expected.parameters)]
        assert f"LlamaForCausalLM with {sum(p.numel() for p in model.parameters()):,} parameters" in out


def save_llama(folder: str) -> None:
    engine, _ = start(write_config(Path(folder, "base-model")), "SGD")
    engine.save_checkpoint(Path(folder, "checkpoints"), "step-300")


@pytest.mark.long_where(name=["estimate", "doctor"])  # they import large packages
@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_work(tmp_path, capsys, monkeypatch, ranks, name):
    ranks(1, save_llama, str(tmp_path))
    (tmp_path / "zeroshard.toml").write_text("stage = 2\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    _, _, found = capsys.readouterr().out.partition("\nexamples:\n")
    assert found
    for example in found.splitlines():
        program, *arguments = shlex.split(example)
        assert [program, arguments[0]] == ["zeroshard", name]
        assert shown(capsys, *arguments) or name == "export", example
    assert (tmp_path / "out/model.safetensors").is_file() == (name == "export")


EXAMPLES = [
    ("reference", "estimate", 1),
    ("reference", "mesh", 1),
    ("pipeline_parallel", "plan", 2),
    ("asynchronous_pipelines", "plan", 1),
]


@pytest.mark.parametrize(("page", "command", "number"), EXAMPLES)
def test_the_examples_of_the_documentation_are_what_is_printed(capsys, monkeypatch, page, command, number):
    monkeypatch.setenv("COLUMNS", "80")
    found = examples(page, command)
    assert len(found) == number
    for arguments, printed in found:
        out = shown(capsys, command, *arguments)
        # The example of an estimate leaves out the note below the table.
        assert out.startswith(printed) if command == "estimate" else out == printed
