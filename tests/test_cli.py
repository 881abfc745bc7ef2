"""The command line: what it shows, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import pytest
import torch

import zeroshard
from tests.distributed.models import GPT, Tiny
from tests.distributed.training import build, square_loss, start, step, token_loss
from zeroshard.cli.commands import parse_size
from zeroshard.cli.main import main
from zeroshard.version import installed_version

ROOT = Path(__file__).parents[1]


def test_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["--version"])
    assert ending.value.code == 0
    assert capsys.readouterr().out == f"zeroshard {installed_version()}\n"
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


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each line of the tables, by the first one."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    return {name: cells for name, *cells in lines}


def test_inspect_lists_every_tensor_who_wrote_it_and_that_it_is_intact(folder):
    command = [sys.executable, "-m", "zeroshard", "inspect", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = rows(done.stdout)
    model = Tiny()
    for name, parameter in model.named_parameters():
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        size = f"{parameter.nbytes} B" if parameter.nbytes < 1024 else f"{parameter.nbytes / 1024:.1f} KiB"
        assert found[name] == ["parameter", "float32", shape, size]
        for key in ("exp_avg", "exp_avg_sq"):
            assert found[f"optimizer/{name}/{key}"] == ["optimizer state", "float32", shape, size]
    count, numel = len(list(model.parameters())), sum(p.numel() for p in model.parameters())
    assert found["parameter"] == [str(count), f"{numel:,}", f"{numel * 4 / 1024:.1f} KiB"]
    assert found["optimizer state"] == [str(2 * count), f"{2 * numel:,}", f"{numel * 8 / 1024:.1f} KiB"]
    assert f"torch {torch.__version__}, num_ranks 2" in done.stdout
    for line in ("model: Tiny", "stage: 2", "step: 2, 0 skipped", "optimizer: AdamW", "second.0"):
        assert line in " ".join(done.stdout.split())
    assert done.stdout.endswith("intact: all files are there and as they were written\n")
    assert not done.stderr


@pytest.mark.parametrize("name", [".", "first", "first.0"])
def test_a_checkpoint_is_found_by_its_folder_its_tag_and_its_directory(folder, capsys, name):
    assert main(["inspect", str(folder / name), "--no-verify"]) == 0
    out = capsys.readouterr().out
    assert str(folder / ("second.0" if name == "." else "first.0")) in out
    assert "checksums were not compared" in out


def test_tied_parameters_are_listed_once(folder, capsys):
    assert main(["inspect", str(folder / "tied")]) == 0
    out = capsys.readouterr().out
    model = build("tied GPT")
    assert isinstance(model, GPT)
    first, second = (
        name for name, p in model.named_parameters(remove_duplicate=False) if p is model.head.weight
    )
    assert f"{first} = {second}" in out
    assert first in rows(out)
    assert second not in rows(out)
    assert rows(out)["parameter"][0] == str(len(list(model.parameters())))


def failure(capsys, *arguments: object) -> tuple[int, str]:
    """The exit code and the one line of a command that fails."""
    try:
        code = main(list(map(str, arguments)))
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert err.startswith("zeroshard: ")
    assert err.count("\n") == 1
    return code, err


def test_wrong_arguments_end_with_2_and_one_line(folder, tmp_path, capsys):
    for arguments, expected in (
        ((), "COMMAND"),
        (("inspekt",), "inspekt"),
        (("inspect", tmp_path / "none"), "none"),
        (("inspect", tmp_path), "expected a checkpoint"),
        (("inspect", folder / "third"), "third"),
        (("export", folder, tmp_path / "out", "--dtype", "int8"), "int8"),
        (("export", folder, tmp_path / "out", "--max-shard-size", "5 apples"), "5 apples"),
        (("export", folder, tmp_path / "out", "--max-shard-size", "0"), "max_shard_bytes"),
        (("export", folder, tmp_path / "out", "--tokenizer", tmp_path / "none"), "expected a folder"),
        (("export", folder, tmp_path / "out", "--tokenizer", tmp_path), "transformers"),
        (("export", folder), "DIR"),
        (("estimate", "7e9"), "--world-size"),
        (("estimate", "7e9", "--world-size", "0"), "world_size"),
        (("estimate", "7e9", "--world-size", "2", "--stage", "9"), "stage"),
        (("estimate", "7e9", "--world-size", "2", "--optimizer-bits", "4"), "optimizer_bits"),
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
    assert main(["inspect", str(folder / "first"), "--no-verify"]) == 0
    capsys.readouterr()
    for damaged, new in ((file, content), (file, content[:-1]), (directory / "zeroshard.json", b"{}")):
        damaged.write_bytes(new)
        code, said = failure(capsys, "inspect", folder / "first")
        assert code == 1
        assert str(damaged) in said


@pytest.mark.parametrize(
    ("key", "value"), [("written_by", 3), ("model", []), ("files", {"../out": {"num_bytes": 1, "crc32": 0}})]
)
def test_a_manifest_that_says_what_cannot_be_is_damaged(folder, tmp_path, capsys, key, value):
    content = json.loads((folder / "second.0" / "zeroshard.json").read_text())["content"] | {key: value}
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (tmp_path / "zeroshard.json").write_text(json.dumps({"content": content, "crc32": crc}))
    (tmp_path.parent / "out").write_bytes(b"x")
    for command in ("inspect", tmp_path), ("export", tmp_path, tmp_path / "new"):
        code, said = failure(capsys, *command)
        assert code == 1
        assert f"{tmp_path / 'zeroshard.json'}: damaged" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12", 12), ("500MB", 500_000_000), ("5GB", 5 * 10**9), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("7B", 7)],
)
def test_sizes_are_read_in_powers_of_1000_and_of_1024(text, expected):
    assert parse_size(text) == expected


def test_estimate_prints_what_the_function_computes(tmp_path, capsys):
    assert main(["estimate", "1e9", "--world-size", "8", "--stage", "1"]) == 0
    assert capsys.readouterr().out == str(zeroshard.estimate(1e9, 8, {"stage": 1})) + "\n"
    (tmp_path / "config.toml").write_text("stage = 2\n")
    assert main(["estimate", "1e9", "--world-size", "8", "--optimizer-bits", "8"]) == 0
    table, note = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert table == str(zeroshard.estimate(1e9, 8, optimizer_bits=8))
    assert note.startswith("peak_unsharded: as if the whole model were gathered at once.")
    assert main(["estimate", "1e9", "--world-size", "8", "--config", str(tmp_path / "config.toml")]) == 0
    assert capsys.readouterr().out == str(zeroshard.estimate(1e9, 8, {"stage": 2})) + "\n"


def test_the_command_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"zeroshard": f"{main.__module__}:{main.__name__}"}
