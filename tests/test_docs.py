"""The documentation is true where a program can tell: links, the table of the config, the first example."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard import Config

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
CONFIG_ROWS = re.findall(
    r"^\| `([\w.]+)` \| `([^`]+)` \| ", (ROOT / "docs/reference.md").read_text(encoding="utf-8"), re.MULTILINE
)
PLANNED = ("offload.", "mesh.", "pipeline.")
"""Sections that `initialize` refuses in this version; the page names them in a sentence."""


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
    expected = {key: value for key, value in leaves(Config()).items() if not key.startswith(PLANNED)}
    assert {key: ast.literal_eval(default) for key, default in CONFIG_ROWS} == expected


def train_as_the_readme_shows() -> tuple[int, float]:
    """Run the example of the README; return the steps that were taken and the last loss."""
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    torch.manual_seed(0)
    inputs = torch.randn(16, 8)
    names: dict[str, Any] = {
        "build_model": lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)),
        "dataset": torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1)),
    }
    exec(example, names)
    return names["engine"].global_step, names["loss"].item()


def test_the_example_of_the_readme_trains(ranks: Any) -> None:
    for global_step, loss in ranks(2, train_as_the_readme_shows):
        assert global_step == 2  # 16 samples, 2 ranks, 4 in a micro-batch
        assert 0 < loss < 2
