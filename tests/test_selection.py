"""Which tests `make test` runs: all but long ones, and one of every file; and their seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import seconds
from tests.conftest import NUM_FAST

CASES = """
import pytest

@pytest.mark.long_where(stage=[1], num_ranks=[3, 4])
@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_matrix(num_ranks, stage):
    pass

@pytest.mark.parametrize("kind", ["fast", pytest.param("slow", marks=pytest.mark.long)])
def test_kind(kind):
    pass

@pytest.mark.long
def test_whole():
    pass
"""
FAST = ["test_matrix[2-0]", "test_matrix[2-1]", "test_matrix[3-0]", "test_kind[fast]"]
LONG = ["test_matrix[3-1]", "test_matrix[4-0]", "test_matrix[4-1]", "test_kind[slow]", "test_whole"]


class Selected:
    """A plugin that notes the names of the tests that would run."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


@pytest.mark.long_where(options=[["--all"], ["-m", "long"]])
@pytest.mark.long_where(name=["::test_kind", "::test_matrix[4-0]"])
@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ([], "", FAST),
        (["--all"], "", FAST + LONG),
        (["-m", "long"], "", LONG),
        ([], "::test_kind", ["test_kind[fast]", "test_kind[slow]"]),
        ([], "::test_matrix[4-0]", ["test_matrix[4-0]"]),
    ],
)
def test_long_tests_run_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], name: str, expected: list[str]
) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    selected = Selected()
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:warnings"]
    plugins.append("--import-mode=importlib")  # leaves sys.modules as it is
    pytest.main(["--collect-only", *plugins, *options, f"test_cases.py{name}"], plugins=[selected])
    assert sorted(selected.names) == sorted(expected)


def test_each_test_file_has_a_test_that_is_not_long(request: pytest.FixtureRequest) -> None:
    """Of the files that this run collects, which are all of them in `make test`."""
    num_fast = request.config.stash[NUM_FAST]
    assert num_fast[__file__] > 0
    assert [file for file, number in num_fast.items() if number == 0] == []


MOST_SECONDS = 410
"""Of all files together, and a budget: it only falls. Two cores take half of it, and 20 s to begin."""


def test_each_test_file_has_its_seconds_within_the_budget_of_all(tmp_path: Path) -> None:
    report = tmp_path / "run.xml"
    cases = '<testcase classname="tests.comm.test_mesh" time="1.26"/>' * 2
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert seconds.of_run(report) == dict.fromkeys(seconds.files(), 0.0) | {"comm/test_mesh.py": 2.5}
    kept = seconds.kept()
    assert sorted(kept) == seconds.files(), f"expected the seconds of each test file: {seconds.RENEW}"
    assert sum(kept.values()) <= MOST_SECONDS
