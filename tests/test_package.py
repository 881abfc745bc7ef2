"""The files of a release: one version everywhere, and an environment that has what they require."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tools.install import requirements

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_changelog_and_citation_have_the_version_of_the_package() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.findall(r"^## ([\d.]+)", changelog, re.MULTILINE)[0]
    assert newest == PROJECT["version"]
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [PROJECT["version"]]
    assert re.findall(r"^license: (.*)$", citation, re.MULTILINE) == [PROJECT["license"]]


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module; f-strings without their values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_an_extra_that_a_message_names_brings_the_packages_that_it_says_are_needed() -> None:
    files = [path for folder in ("zeroshard", "examples", "tools") for path in (ROOT / folder).rglob("*.py")]
    sources = [text for path in files if "zeroshard[" in (text := path.read_text(encoding="utf-8"))]
    texts = {text for source in sources for text in texts_of(ast.parse(source))}
    found = {text for text in texts if "pip install zeroshard[" in text}
    for text in found:
        match = re.search(r"\bneeds? ([\w-]+)(?: and ([\w-]+))?: pip install zeroshard\[([\w,]+)\]$", text)
        assert match, f"expected 'needs PACKAGE: pip install zeroshard[EXTRA]' in {text!r}"
        *packages, extras = filter(None, match.groups())
        brought = {re.match(r"[\w.-]+", line)[0] for line in requirements(PROJECT, extras.split(","))}  # type: ignore[index]
        assert brought >= set(packages), text
    named = {text.split("zeroshard[")[1].split("]")[0] for text in found}
    assert named == {"hf", "eightbit"}


def test_each_extra_that_a_page_names_is_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for extras in re.findall(r"zeroshard\[([\w,]+)\]", page.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), page
