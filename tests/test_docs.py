"""The documentation is true where a program can tell: links, the table of the config, the first example."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import runpy
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.given import GIVEN
from tests.test_frame import LEVEL, code_lines, part_of
from zeroshard import Config

ROOT = Path(__file__).parents[1]
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/diary.md"]
PAGES = sorted([*TOP, *(ROOT / "docs").glob("*.md")])
CONFIG_ROWS = re.findall(
    r"^\| `([\w.]+)` \| `([^`]+)` \| ", (ROOT / "docs/reference.md").read_text(encoding="utf-8"), re.MULTILINE
)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def leaves(section: Any, prefix: str = "") -> dict[str, Any]:
    """The fields of a config, by dotted name, with their values."""
    found = {}
    for option in fields(section):
        value = getattr(section, option.name)
        inside = leaves(value, f"{prefix}{option.name}.") if is_dataclass(value) else None
        found |= inside if inside is not None else {f"{prefix}{option.name}": value}
    return found


def test_the_table_of_the_config_has_every_key_and_its_default() -> None:
    assert {key: ast.literal_eval(default) for key, default in CONFIG_ROWS} == leaves(Config())


def test_the_tables_of_offload_are_those_of_the_estimates() -> None:
    page = (ROOT / "docs/offload.md").read_text(encoding="utf-8")
    computed = runpy.run_path(str(ROOT / "benchmarks/offload_fit.py"))
    for name in ("settings", "bytes"):
        table = page.partition(f"<!-- {name}: ")[2].partition("-->\n")[2].partition("\n<!-- end")[0]
        assert table == computed[f"{name}_table"]()


(README_EXAMPLE,) = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)


def test_the_home_page_has_the_example_of_the_readme() -> None:
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert re.findall(r"```python\n(.*?)```", home, re.DOTALL) == [README_EXAMPLE]


def train_as_the_readme_shows(folder: Path) -> tuple[int, float]:
    """Run the example of the README in a folder; return the steps that were taken and the last loss."""
    names: dict[str, Any] = {}
    with contextlib.chdir(folder), mock.patch.dict(os.environ, HOME=str(folder)):  # the cache lies in HOME
        if dist.get_rank() == 0:
            Path("corpus.txt").write_text("Some text of several blocks. " * 200, encoding="utf-8")
        bytes_of = next(GIVEN["data.md"]())["tokenizer"]  # all ranks meet there

        def tokenizer(text: str, return_tensors: str) -> SimpleNamespace:
            return SimpleNamespace(input_ids=torch.tensor([bytes_of.encode(text)]))

        with mock.patch("transformers.AutoTokenizer.from_pretrained", return_value=tokenizer):
            exec(README_EXAMPLE, names)
    return names["engine"].global_step, names["loss"].item()


def test_the_example_of_the_readme_trains(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for global_step, loss in ranks(2, train_as_the_readme_shows, tmp_path):
        assert global_step > 0
        assert 0 < loss < 5
    assert (tmp_path / "out/config.json").is_file()
    assert list((tmp_path / "out").glob("*.safetensors"))


REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")


def average_and_stream(folder: Path) -> tuple[int, list[str], bool]:
    """Run two examples of the reference; return updates, names of the stream, and if averages were shown."""
    torch.manual_seed(0)
    inputs = torch.randn(16, 8)
    sent: dict[str, torch.Tensor] = {}
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
    loss_fn = nn.functional.cross_entropy
    config = {"micro_batch_size": 4}
    made = zeroshard.initialize(model, optimizer, config, training_data=dataset, loss_fn=loss_fn)
    names: dict[str, Any] = {
        "zeroshard": zeroshard,
        "engine": made.engine,
        "dataloader": made.dataloader,
        "loss_fn": loss_fn,
        "send_to_server": sent.__setitem__,
    }
    for title in ("averages of a run", "a stream of full parameters"):
        (example,) = re.findall(rf"```python\n# {title}\n(.*?)```", REFERENCE, re.DOTALL)
        exec(example.replace('"checkpoints"', repr(str(folder))), names)
    trained, shown = made.engine.full_state_dict(), names["state_dict"]
    is_other = any(not torch.equal(shown[name], trained[name]) for name in shown)
    assert {values.dtype for values in sent.values()} == {torch.bfloat16}
    return names["ema"].num_updates, list(sent), is_other


def test_the_examples_of_averages_and_streams_run(ranks: Any, tmp_path: Path) -> None:
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    found = ranks(2, average_and_stream, tmp_path)
    for num_updates, sent, _ in found:
        assert num_updates == 2  # 16 samples, 2 ranks, 4 in a micro-batch
        assert sorted(sent) == sorted(names)
    assert found[0][2], "expected averages in full_state_dict(), not the trained values"
    assert (tmp_path / "latest").is_file()


def log_steps(folder: Path) -> list[dict[str, float]]:
    """Run the example of the log; return the lines of its file."""
    torch.manual_seed(0)
    inputs = torch.randn(16, 8)
    model = nn.Linear(8, 3)
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
    config = {"micro_batch_size": 4}
    made = zeroshard.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), config, training_data=dataset
    )
    (example,) = re.findall(r"```python\n# a log of steps\n(.*?)```", REFERENCE, re.DOTALL)
    names = {"zeroshard": zeroshard, "engine": made.engine, "dataloader": made.dataloader}
    with contextlib.chdir(folder):
        exec(example, names | {"loss_fn": nn.functional.cross_entropy})
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def test_the_example_of_the_log_runs(ranks: Any, tmp_path: Path) -> None:
    noted, report = ranks(2, log_steps, tmp_path)[0]
    assert noted == {"step": 2, "held_out_loss": 2.3}  # before the report of the last steps, at the end
    assert report["step"] == 2  # 16 samples, 2 ranks, 4 in a micro-batch
    assert 0 < report["loss"] < 3


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
STOPS = re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", ARCHITECTURE)


def defined(path: str) -> set[str]:
    """The functions, classes and methods that a module of the package defines, without importing it."""
    names = set()
    for node in ast.parse((ROOT / "zeroshard" / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)
            )
    return names


@pytest.mark.parametrize(("path", "name"), sorted(set(STOPS)))
def test_a_stop_of_the_architecture_exists(path: str, name: str) -> None:
    assert name in defined(path)


def test_the_architecture_has_each_life_once_and_all_of_its_stops_are_found() -> None:
    titles = re.findall(r"^## (The life of .*)$", ARCHITECTURE, re.MULTILINE)
    assert titles == [f"The life of a {what}" for what in ("unit", "gradient", "step", "micro-batch")]
    assert len(STOPS) == len(re.findall(r"`[\w/]+\.py:\s", ARCHITECTURE)) > 50


def test_the_first_reading_is_short_enough() -> None:
    listed = ARCHITECTURE.partition("\n## The first reading\n")[2].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", listed)
    sources = [(ROOT / "zeroshard" / file).read_text(encoding="utf-8") for file in files]
    assert len(files) == len(set(files)) > 12
    assert sum(map(code_lines, sources)) < 3000


def test_the_glossary_has_few_words() -> None:
    glossary = ARCHITECTURE.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|", glossary, re.MULTILINE)[1:]
    words = [word for row in rows for word in row.split(", ")]
    assert len(words) == len(set(words)) <= 45


CORE = ("plan", "parameters", "sharding", "stepping", "comm")
"""The folders whose modules the layer picture names; of the others it has one line."""


def test_the_layer_picture_has_every_part_and_every_module_of_the_core() -> None:
    picture = ARCHITECTURE.partition("\n## Layers\n")[2].partition("```")[2].partition("```")[0]
    drawn, folders = set(), [""]
    for indent, name in re.findall(r"^( +)([\w/]+(?:\.py|/)) ", picture, re.MULTILINE):
        depth = max(0, (len(indent) - 4) // 2)
        folders[depth:] = [folders[depth - 1] + name if depth else name]
        drawn.add(folders[depth])
    core = tuple(f"zeroshard/{folder}/" for folder in CORE)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "zeroshard").rglob("*.py")}
    named = {path for path in modules if path.startswith(core) and not path.endswith("/__init__.py")}
    parts = {part_of(name) for name in drawn if name.startswith("zeroshard/")}
    assert LEVEL.keys() == parts
    assert named == {name for name in drawn if name.startswith(core) and name.endswith(".py")}
