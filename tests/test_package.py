"""The files of a release: one version everywhere, and an environment that has what they require."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from tools.install import requirements
from tools.package import required
from tools.smoke import OPTIONAL

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_changelog_and_citation_have_the_version_of_the_package() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.findall(r"^## ([\d.]+)", changelog, re.MULTILINE)[0]
    assert newest == PROJECT["version"]
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [PROJECT["version"]]
    assert re.findall(r"^license: (.*)$", citation, re.MULTILINE) == [PROJECT["license"]]


def test_no_package_that_the_smoke_test_expects_to_be_absent_is_required() -> None:
    names = {re.match(r"[\w.-]+", line)[0] for line in PROJECT["dependencies"]}  # type: ignore[index]
    assert names == {"torch", "numpy", "psutil"}
    assert not names & OPTIONAL


def test_the_smoke_test_knows_each_package_that_the_import_of_a_module_needs() -> None:
    names = set()
    for path in (ROOT / "zeroshard").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:  # not those inside of functions
            if isinstance(node, ast.Import):
                names.add(node.names[0].name.partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module).partition(".")[0])
    known = {"torch", "numpy", "psutil", "zeroshard", "triton"} | OPTIONAL
    assert names - sys.stdlib_module_names <= known


class Installed(Distribution):
    """A stand-in for an installed package: its requirements, and its files below a folder."""

    def __init__(self, name: str, requires: tuple[str, ...], folder: Path = Path()) -> None:
        self._name, self._requires, self._folder = name, requires, folder

    def read_text(self, filename: str) -> str | None:
        if filename == "RECORD":
            return "a/b.py,,\na/gone.py,,\n../../bin/tool,,\n"
        lines = [f"Name: {self._name}", *(f"Requires-Dist: {line}" for line in self._requires)]
        return "\n".join(lines) if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return self._folder / str(path)


REQUIREMENTS = {
    "Torch": ("kit[blas]; python_version >= '3'", "windows-only; sys_platform == 'win32'"),
    "kit": ("blas; extra == 'blas'", "fft; extra == 'fft'", "Torch"),
    "blas": (),
}


def find(name: str) -> Distribution:
    if name not in REQUIREMENTS:
        raise PackageNotFoundError(name)
    return Installed(name, REQUIREMENTS[name])


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module; f-strings without their values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_an_extra_that_a_message_names_brings_the_packages_that_it_says_are_needed() -> None:
    files = [path for folder in ("zeroshard", "examples", "tools") for path in (ROOT / folder).rglob("*.py")]
    texts = {text for path in files for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))}
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


def test_requirements_are_followed_with_their_extras_and_markers() -> None:
    assert required(["Torch>=1", "more; extra == 'more'"], find).keys() == {"torch", "kit", "blas"}
