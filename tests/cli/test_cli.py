"""The command line: what it shows, and how it ends. Estimates are in `test_estimate.py`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.commands import examples, failure, rows, shown, write_llama
from tests.distributed.models import Tiny
from tests.distributed.training import start, take_steps
from zeroshard.cli import checkpoints, doctor
from zeroshard.cli.main import main
from zeroshard.cli.options import COMMANDS, parse_model
from zeroshard.parallel.pipeline.actions import parse_schedule
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.plan.arrangement import Arrangement
from zeroshard.planning import machine
from zeroshard.tables import format_bytes
from zeroshard.version import installed_version

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


FOUR_EIGHT = ("--stages", 4, "--microbatches", 8)


def named(*names: str) -> list[str]:
    return [word for name in names for word in ("--schedule", name)]


def test_version_is_that_of_the_installed_package():
    command = [sys.executable, "-m", "zeroshard", "--version"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == f"zeroshard {installed_version()}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert installed_version() in (project["version"], "not installed")


def save(folder: str) -> None:
    engine, _ = start(Tiny(), stage=2, clip_grad_norm=1.0)
    take_steps(engine, range(2))
    engine.save_checkpoint(folder, "first")
    engine.save_checkpoint(folder, "second")


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks(2, save, str(folder))
    return folder


def test_inspect_tells_the_origin_then_tensors_then_that_it_is_intact(folder, capsys, monkeypatch):
    monkeypatch.setattr(checkpoints, "_MOST_TENSORS", 1000)
    summary, totals, tensors, verdict = shown(capsys, "inspect", folder).split("\n\n")
    named = dict(Tiny().named_parameters())
    count, numel = len(named), sum(p.numel() for p in named.values())
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
    for name, parameter in named.items():
        cells = ["float32", "x".join(map(str, parameter.shape)) or "scalar", format_bytes(parameter.nbytes)]
        assert found[name] == ["parameter", *cells]
        for key in ("exp_avg", "exp_avg_sq"):
            assert found[f"optimizer/{name}/{key}"] == ["optimizer state", *cells]
    assert [name for name, (kind, *_) in found.items() if kind == "parameter"] == list(named)
    assert verdict == "intact: all files are there and as they were written\n"
    monkeypatch.setattr(checkpoints, "_MOST_TENSORS", 2)
    *_, tensors, _ = shown(capsys, "inspect", folder).split("\n\n")
    assert tensors.startswith(f"tensors, 2 of {3 * count}: --json has all\n")
    assert len(tensors.splitlines()) == 3 + 2


def test_inspect_tells_programs_the_same_in_json(folder, capsys):
    found = json.loads(shown(capsys, "inspect", folder / "first", "--json"))
    assert (found["step"], found["stage"], found["optimizer"], found["verified"]) == (2, 2, "AdamW", True)
    weights = {name: tensor for name, tensor in found["tensors"].items() if tensor["kind"] == "parameter"}
    expected = {name: (list(p.shape), p.nbytes) for name, p in Tiny().named_parameters()}
    assert {name: (tensor["shape"], tensor["bytes"]) for name, tensor in weights.items()} == expected
    unverified = json.loads(shown(capsys, "inspect", folder / "first", "--json", "--no-verify"))
    assert unverified == found | {"verified": False}


def test_wrong_arguments_end_with_2_and_one_line(folder, tmp_path, capsys):
    own = tmp_path / "own.csv"
    own.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", encoding="utf-8")  # a deadlock
    stages, batches = ("--stages", 10**6), ("--microbatches", 10**6)
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
        (("estimate", "7e9", "--ranks", "0"), "expected a whole number above 0, got '0'"),
        (("estimate", "7e9", "--ranks", "2,4"), "--ranks"),
        (("estimate", "7e9", "--stage", "9"), "stage"),
        (("estimate", "7e9", "--optimizer-bits", "4"), "optimizer-bits"),
        (("estimate", "7e9", "--precision", "int8"), "int8"),
        (("estimate", "7e9", "--config", "a.toml", "--stage", "1"), "in the place of --stage: leave"),
        (("estimate", "7B", "--tokens", 100, "--length", 3), "expected a divisor of the 100 tokens, got 3"),
        (("estimate", "7B", "--host", "1TiB"), "--host needs --memory"),
        (("estimate", "7B", "--memory", "80GB", "--nvme", "1TiB"), "--nvme needs --memory and --host"),
        (("estimate", "7B", "--length", 4096), "--length needs --tokens"),
        (("estimate", "7B", "--memory-budget", "9GB"), "--memory-budget needs --tokens and --recompute auto"),
        (("estimate", "7B", "--pp", 3), "mesh.pp=3"),
        (("estimate", "7B", "--lora", 8), "expected the config.json of a model, got a number"),
        (("estimate", "7B", "--weight-bits", 8), "expected the config.json of a model, got a number"),
        (("mesh",), "--ranks"),
        (("mesh", "--ranks", "many"), "'many'"),
        (("mesh", "--ranks", 0), "--ranks/--world-size: expected a whole number above 0"),
        (("mesh", "--ranks", 10**12), "--ranks: expected at most 4,096, got 1,000,000,000,000"),
        (("mesh", "--ranks", 8, "--tp", 0), "--tp: expected a whole number above 0, got '0'"),
        (("mesh", "--ranks", 32, "--tp", 4, "--shard-group-size", 3), "size=3: expected a multiple of 12"),
        (("plan",), "--schedule"),
        (("plan", *named("dream")), "one of gpipe, 1f1b, interleaved, zb-h1, zbv, varuna, pipedream, 2bw"),
        (("plan", *named("pipedream")), "--schedule pipedream needs --stages and --microbatches"),
        (("plan", *named("pb"), "--stages", 0, *batches), "--pp: expected a whole number above 0"),
        (("plan", *named("pb"), *FOUR_EIGHT, "--recompute", 1), "expected synchronous schedules, got pb"),
        (("plan", *named("1f1b"), "--microbatches", "-2"), "--microbatches: expected a whole number above 0"),
        (("plan", *named("1f1b"), *FOUR_EIGHT, "--chunks", 2), "1f1b: expected 1 chunk a rank, got 2"),
        (("plan", *named("1f1b"), *FOUR_EIGHT, "--forward", "-1"), "a duration of at least 0, got -1.0"),
        (("plan", *named("1f1b", "zbv"), *FOUR_EIGHT, "--list"), "--list: expected one --schedule, got 2"),
        (("plan", *named("1f1b"), *stages, *batches), "262,144 chunks times micro-batches, got 1,000,"),
        (("plan", *named(str(own)), "--stages", 3), "expected --stages 2, as in the lists, got 3"),
        (("plan", *named(str(own))), "deadlock: pipeline rank 0: 0B0 waits for 1B0; pipeline rank 1: 1F1"),
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
    options = ("--tp", tp, "--pp", pp, *(() if size is None else ("--shard-group-size", size)))
    title, columns, _, *found = shown(capsys, "mesh", "--ranks", num_ranks, *options).splitlines()
    arrangement = Arrangement(num_ranks, pp, tp, size)
    sizes = arrangement.sizes._asdict()
    assert title.endswith(": " + " x ".join(f"{axis} {number}" for axis, number in sizes.items()))
    assert columns.split() == ["rank", *sizes]
    expected = [[rank, *arrangement.coordinates(rank)] for rank in range(num_ranks)]
    assert [list(map(int, row.split())) for row in found] == expected


def test_numbers_of_parameters_are_read_as_people_write_them():
    given = ("7e9", "135_000_000", "135,000,000", "1.235B", "1T", "2.5k")
    assert list(map(parse_model, given)) == [7 * 10**9, 135e6, 135e6, 1_235_000_000, 10**12, 2500]


def save_llama(folder: str) -> None:
    engine, _ = start(write_llama(Path(folder, "base-model")), "SGD")
    engine.save_checkpoint(Path(folder, "checkpoints"), "step-300")


@pytest.mark.long_where(name=["estimate", "doctor", "plan"])  # they import large packages, or search long
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


def test_the_examples_of_the_documentation_are_what_is_printed(capsys):
    found = {command: examples("reference", command) for command in ("estimate", "mesh")}
    found["plan"] = examples("pipeline_parallel", "plan") + examples("asynchronous_pipelines", "plan")
    assert list(map(len, found.values())) == [1, 1, 3]
    for command, pairs in found.items():
        for arguments, printed in pairs:
            out = shown(capsys, command, *arguments)
            # The example of an estimate leaves out the note below the table.
            assert out.startswith(printed) if command == "estimate" else out == printed


# ------------------------------------------------------------------------------------------------- the doctor


def test_the_page_has_versions_the_machine_and_features(capsys):
    out = shown(capsys, "doctor")
    assert re.search(rf"torch +{re.escape(torch.__version__)}\n", out)
    assert re.search(r"backends of torch .*gloo", out)
    assert re.search(r"models of transformers +yes: transformers \S+, safetensors \S+\n", out)


def test_the_rates_of_the_machine_are_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_BYTES", 1 << 24)
    monkeypatch.setattr(machine, "_WIDTHS", {"cpu": 64})
    found = json.loads(shown(capsys, "doctor", "--disk", tmp_path))
    assert (found["device"], found["num_devices"], found["to_host"]) == ("cpu", 1, None)
    assert found["flops"].keys() == {"float32", "bfloat16"}
    rates = [*found["flops"].values(), *(found[name] for name in ("bandwidth", "disk_write", "disk_read"))]
    assert all(1e5 < rate < 1e15 for rate in rates)
    assert 0 < found["host_bytes"] == found["device_bytes"]
    assert not list(tmp_path.iterdir())


def test_packages_and_devices_are_told_with_the_reason(monkeypatch):
    versions = {"numba": "0.60", "peft": "0.21", "numpy": "2.3"}

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def broken(name):
        raise RuntimeError(f"lib{name}.so: cannot open shared object file\nmore")

    module = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(name="H100"),
        mem_get_info=lambda index: (70 * GIB, 80 * GIB),
    )
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "import_module", broken)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    lines = [" ".join(line.split()) for line in doctor.page().splitlines()]
    broken_lib = "libnumba.so: cannot open shared object file"
    device = "H100, 70.00 GiB free of 80.00 GiB"
    assert lines.index(f"cuda:1 {device}") == lines.index(f"cuda:0 {device}") + 1
    assert {
        "LoRA yes: peft 0.21",
        f"8-bit states on CPUs, fast no: numba 0.60 does not load: {broken_lib}",
        "Lightning no: lightning is not installed: pip install lightning",
    } <= set(lines)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: broken("cuda"))
    assert doctor.read_machine()["accelerator"] == "none: libcuda.so: cannot open shared object file"


# ------------------------------------------------------------------------------------- schedules of pipelines


def test_schedules_are_compared_side_by_side(capsys):
    out = shown(capsys, "plan", *named("gpipe", "1f1b", "interleaved", "zb-h1"), *FOUR_EIGHT)
    found = rows(out)
    assert "1f1b   interleaved, 2 chunks   zb-h1" in out
    assert found["makespan"] == ["33", "33", "28.5", "27"]
    shares = [1 - 24 / makespan for makespan in (33, 33, 28.5, 27)]
    assert found["bubble share"] == [f"{share:.1%}" for share in shares]
    # Interleaved: (2 - 1) * 4 + 2 * (3 - rank) forwards ahead, one more, and each is half of a rank.
    assert [found[f"activations, rank {rank}"] for rank in range(4)] == [
        ["8", "4", "5.5", "4"],
        ["8", "3", "4.5", "4"],
        ["8", "2", "3.5", "4"],
        ["8", "1", "2.5", "4"],
    ]
    assert max(map(len, out.splitlines())) < 80


def test_asynchronous_schedules_show_delays_and_versions(capsys):
    """Narayanan et al. 2019 and 2021: p - 1 - s steps and p - s versions; one step and two versions."""
    options = ("--stages", 4, "--microbatches", 16)
    found = rows(shown(capsys, "plan", *named("1f1b", "pipedream", "2bw", "pb"), *options))
    assert found["makespan"] == ["57"] * 4  # (16 + 4 - 1) * 3: each list fills and drains once
    assert found["steps"] == ["1", "16", "4", "16"]
    drained = [num_steps * (16 // num_steps + 4 - 1) * 3 for num_steps in (1, 16, 4, 16)]
    assert found["1f1b, as many steps"] == list(map(str, drained))
    assert [found[f"delay in steps, rank {rank}"] for rank in range(4)] == [
        ["0", "3", "1", "3"],
        ["0", "2", "1", "2"],
        ["0", "1", "1", "1"],
        ["0", "0", "0", "0"],
    ]
    assert [found[f"versions of weights, rank {rank}"] for rank in range(4)] == [
        ["1", "4", "2", "1"],
        ["1", "3", "2", "1"],
        ["1", "2", "2", "1"],
        ["1", "1", "2", "1"],
    ]


def test_a_list_is_printed_and_read_back_as_a_schedule_of_the_user(capsys, tmp_path):
    text = shown(capsys, "plan", *named("varuna"), *FOUR_EIGHT, "--list")
    assert parse_schedule(text) == build_schedule("varuna", 4, 8)
    file = tmp_path / "own.csv"
    file.write_text(text, encoding="utf-8")
    found = rows(shown(capsys, "plan", *named(str(file))))
    assert found["makespan"] == ["39"]
    assert rows(shown(capsys, "plan", *named(str(file), "varuna"), *FOUR_EIGHT))["makespan"] == ["39", "39"]
