"""The breaks of the net fit the present code, and its runner shows which of them tests have found.

The breaks themselves are run by `python -m tests.net`.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.net.breaks import BREAKS
from tests.net.runner import FUZZ, Break, Checkout, find_breaks, located

ROOT = Path(__file__).parents[1]
MOST_SAYS = 130


@functools.cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a test file by name."""
    found = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {node.name: node for node in found if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
def test_a_break_fits_the_code_and_has_tests(one: Break) -> None:
    assert one.file.startswith("zeroshard/")
    text = one.damaged(ROOT)
    ast.parse(text)
    assert text != (ROOT / one.file).read_text(encoding="utf-8")
    assert one.says.endswith(".")
    assert len(one.says) <= MOST_SAYS
    assert one.tests
    for test in one.tests:
        if test.startswith(FUZZ):
            int(test.removeprefix(FUZZ))
            continue
        file, _, name = located(ROOT, test).partition("::")
        functions = functions_of(file)
        if name:
            marks = map(ast.unparse, functions[name.partition("[")[0]].decorator_list)
            assert "pytest.mark.long" not in {mark.partition("(")[0] for mark in marks}, (
                "the net has fast tests alone"
            )


def test_there_are_sixty_breaks_with_names_of_their_own() -> None:
    names = Counter(one.name for one in BREAKS)
    assert len(names) >= 60
    assert max(names.values()) == 1


CODE = """
def add(a, b):
    return a + b


def refuse(a):
    if a < 0:
        raise ValueError("below 0")
"""
TESTS = """
from zeroshard.sums import add, refuse


def test_add():
    assert add(1, 2) == 3


def test_refuse():
    refuse(1)
"""


def broken(name: str, find: str, replace: str, tests: str = "tests/test_sums.py") -> Break:
    where = {"file": "zeroshard/sums.py", "tests": (tests,)}
    return Break(name=name, says="Wrong.", find=find, replace=replace, **where)


FOUND = broken("found", "a + b", "a - b")
MISSED = broken("missed", "a < 0", "False", "tests/test_sums.py::test_refuse")
NO_TEST = broken("no_test", "a < 0", "False", "tests/test_sums.py::test_of_another_name")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    root = tmp_path / "checkout"
    files = {"zeroshard/sums.py": CODE, "tests/test_sums.py": TESTS, "left_out.pyc": ""}
    files |= {".gitignore": "*.pyc", "pytest.ini": "[pytest]\nmarkers = long\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def test_the_runner_shows_which_breaks_are_found(checkout: Path, tmp_path: Path, capsys: Any) -> None:
    assert not find_breaks(checkout, [NO_TEST], tmp_path / "none")
    assert capsys.readouterr().out.startswith("FAILS")
    assert not find_breaks(checkout, [FOUND, MISSED], tmp_path / "copies")
    intact, found, missed, total = capsys.readouterr().out.splitlines()
    assert intact.startswith("passes")
    assert found.startswith("found ")
    assert found.endswith("found  tests/test_sums.py::test_add: assert -1 == 3")
    assert missed.startswith("NOT FOUND")
    assert total == "1 of 2 breaks were found"
    assert (checkout / "zeroshard/sums.py").read_text(encoding="utf-8") == CODE
    assert (tmp_path / "copies/0/zeroshard/sums.py").read_text(encoding="utf-8") == CODE
    assert not (tmp_path / "copies/0/left_out.pyc").exists()


def test_a_file_is_damaged_for_the_time_of_its_tests(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"twice: expected the text once in zeroshard/sums.py, found it 2"):
        broken("twice", "def ", "").damaged(checkout)
    copy, file = Checkout(checkout, tmp_path / "copy"), tmp_path / "copy/zeroshard/sums.py"
    with suppress(KeyboardInterrupt), copy.damage(FOUND):
        assert "a - b" in file.read_text(encoding="utf-8")
        raise KeyboardInterrupt
    assert file.read_text(encoding="utf-8") == CODE
