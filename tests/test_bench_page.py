"""The page of `make bench`: of given documents, with failures, without peers. The tables of the docs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
sys.path.append(str(ROOT / "benchmarks"))  # its modules import each other by their bare names

import documents  # noqa: E402
import page  # noqa: E402
import plots  # noqa: E402
import suite  # noqa: E402
import tables  # noqa: E402

MARKED = re.findall(r"<!-- table: (\w+) ([\w ]+?) -->", page.PERFORMANCE.read_text(encoding="utf-8"))
PUBLISHED = dict(reversed(MARKED))
"""Published documents of each kind of table: those of the first one on the page."""

MEDIAN = {"value": 0.5, "low": 0.4, "high": 0.6}
DOCUMENT = {
    "benchmark": "page/some",
    "command": "python benchmarks/some.py --ranks 2",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "uncommitted_changes": False,
    "machine": {"cpu": "a processor", "cores": 2, "memory_gb": 8.0, "gpus": []},
    "versions": {"python": "3.11.7", "torch": "2.14.1", "deepspeed": None},
    "settings": {"ranks": 4, "tp": 2, "stage": 3},
    "rows": {
        "zeroshard, s a step": MEDIAN,
        "torch, s a step": {"value": 2.0, "low": 1.0, "high": 3.0},
        "ratio zeroshard/torch": {"value": 0.25, "low": 0.125, "high": 0.375},
    },
}
"""A document as a benchmark of tensor parallelism writes it."""


def benchmark(folder: Path, name: str, code: str) -> suite.Benchmark:
    """A section with a run of some code, which finds the path of its document as `path`."""
    script, path = folder / f"{name}.py", folder / "page" / f"{name}.json"
    script.write_text(f"import pathlib, sys\npath = pathlib.Path({str(path)!r})\n{code}\n")
    run = suite.Run(name=name, command=str(script), start_s=0.0)
    return suite.Benchmark(name=name, title=name, text="Text.", runs=(run,), kind="tensor_parallel")


SHARED = ("engines", "model", "pipeline", "turns")
"""Modules that add flags to the command lines of several scripts."""


def text_of(folder: Path) -> str:
    """The text of the page, without pictures and elements."""
    html = (folder / "page/index.html").read_text(encoding="utf-8")
    return re.sub(r"<svg.*?</svg>|<style.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)


@pytest.mark.parametrize("kind", sorted(tables.TABLES))
def test_each_kind_has_a_table_and_a_picture_of_published_documents(kind: str) -> None:
    found = [documents.read(RESULTS / f"{name}.json") for name in PUBLISHED[kind].split()]
    table = tables.TABLES[kind](*found)
    assert table.rows
    assert {len(row) for row in table.rows} == {len(table.columns)}
    chart = plots.chart_of(table)
    assert {bar.is_own for bar in chart.bars} >= {True}
    assert all(bar.median.low <= bar.median.value <= bar.median.high for bar in chart.bars)


def test_a_benchmark_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    found = [
        benchmark(tmp_path, "bad", "print('an error <of> the benchmark'); sys.exit(3)"),
        benchmark(tmp_path, "good", f"path.write_text({json.dumps(DOCUMENT)!r})"),
    ]
    assert page.make(found, None, tmp_path / "page", None) == 1
    text = text_of(tmp_path)
    assert "bad: failed; exit status 3; the last lines of its output:" in text
    assert "an error &lt;of&gt; the benchmark" in text
    facts = ("python benchmarks/some.py --ranks 2", "2026-01-02", "0123456", "a processor, 2 cores, 8.0 GB")
    figures = ("tp 2, dp 2, stage 3", "0.500", "2.000", "0.250 [0.125, 0.375]")
    for shown in (*facts, *figures, "python 3.11.7, torch 2.14.1"):
        assert shown in text
    assert page.make(found, "good", tmp_path / "page", None) == 0  # the failure of another call is kept
    assert "bad: failed; exit status 3" in text_of(tmp_path)


def test_all_benchmarks_fit_in_twenty_minutes() -> None:
    planned = suite.budget(suite.CPU, suite.MINUTES)
    runs = [run for one in suite.CPU for run in one.runs]
    assert planned.limit_s == 20 * 60
    assert sum(run.estimated_s(planned.scale) for run in runs) <= 0.9 * planned.limit_s
    assert sum(run.estimated_s(1) for run in runs) <= 0.9 * planned.limit_s


@pytest.mark.parametrize("device", suite.SUITES)
def test_each_script_has_the_flags_that_it_is_given(device: str) -> None:
    shared = "".join((ROOT / f"benchmarks/{name}.py").read_text() for name in SHARED)
    names = [run.name for one in suite.SUITES[device] for run in one.runs]
    assert len(names) == len(set(names))
    for one in suite.SUITES[device]:
        assert one.table in tables.TABLES
        for run in one.runs:
            script, *arguments = run.arguments(1, "page")
            source = (ROOT / "benchmarks" / script).read_text() + shared
            for flag in (argument for argument in arguments if argument.startswith("--")):
                name = flag.removeprefix("--").replace("-", "_")  # of a keyword, a key or a field
                assert re.search(rf'"{flag}"|\b{name}"?[=:]', source), f"{script} {flag}"


def test_the_tables_of_a_page_are_those_of_the_documents() -> None:
    for file, by_hand in ((page.PERFORMANCE, 1), (page.EXPERIMENTS, 0)):  # that of choices has no figures
        text = file.read_text(encoding="utf-8")
        filled = tables.fill(text, RESULTS, page.OF_DOCS)
        assert filled == text, "python benchmarks/page.py --tables writes them"
        rest, number = re.subn(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
        assert len(re.findall(r"^\|(?: *:?-+:? *\|)+$", rest, re.MULTILINE)) <= by_hand
        assert number == text.count("<!-- end -->") > 0


def test_benchmarks_find_what_they_import_of_each_other() -> None:
    sources = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    missing = [
        f"{stem} imports {name} of {module}"
        for stem, source in sources.items()
        for module, names in re.findall(r"^from (\w+) import (\([^)]*\)|.*)$", source, re.MULTILINE)
        for name in re.findall(r"\w+", names)
        if module in sources and not re.search(rf"^(\w.*)?\b{name}\b", sources[module], re.MULTILINE)
    ]
    assert missing == []
