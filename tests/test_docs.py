"""The documentation is true where a program can tell: links, the table of the config, the first example."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.given import GIVEN
from tests.ranks import on_ranks
from zeroshard import Config
from zeroshard.config.checked import flat

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


def test_the_table_of_the_config_has_every_key_and_its_default() -> None:
    assert {key: ast.literal_eval(default) for key, default in CONFIG_ROWS} == flat(Config())


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


@on_ranks(2)
def test_the_example_of_the_readme_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    with (
        contextlib.chdir(tmp_path),
        mock.patch.dict(os.environ, HOME=str(tmp_path)),
    ):  # the cache lies in HOME
        if dist.get_rank() == 0:
            Path("corpus.txt").write_text("Some text of several blocks. " * 200, encoding="utf-8")
        bytes_of = next(GIVEN["data.md"]())["tokenizer"]  # all ranks meet there

        def tokenizer(text: str, return_tensors: str) -> SimpleNamespace:
            return SimpleNamespace(input_ids=torch.tensor([bytes_of.encode(text)]))

        with mock.patch("transformers.AutoTokenizer.from_pretrained", return_value=tokenizer):
            exec(README_EXAMPLE, names)
        assert names["engine"].global_step > 0
        assert 0 < names["loss"].item() < 5
        assert Path("out/config.json").is_file()
        assert list(Path("out").glob("*.safetensors"))


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


def test_the_glossary_has_few_words() -> None:
    glossary = ARCHITECTURE.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|", glossary, re.MULTILINE)[1:]
    words = [word for row in rows for word in row.split(", ")]
    assert len(words) == len(set(words)) <= 45
