"""The page of `make bench`: of given documents, with failures, without peers. The tables of the docs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zeroshard import Config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
sys.path.append(str(ROOT / "benchmarks"))  # its modules import each other by their bare names

import documents  # noqa: E402
import page  # noqa: E402
import plots  # noqa: E402
import running  # noqa: E402
import suite  # noqa: E402
import tables  # noqa: E402

PUBLISHED = {
    "step_time": ["step_time_2ranks_batch1"],
    "memory": ["memory"],
    "rss": ["rss_2ranks_fp32_batch1"],
    "checkpoint": ["checkpoint_2ranks"],
    "optimizers": ["optimizers_cpu"],
    "main_dtype": ["main_dtype_cpu"],
    "muon": ["muon_2ranks_stage3", "muon_2ranks_stage0"],
    "nvme": ["nvme"],
    "offload": ["offload_cpu_2ranks_deepspeed"],
    "offload_rss": ["offload_rss"],
    "offload_gpu": ["offload_gpu_core"],
    "pipeline": ["pipeline_2ranks_llama"],
    "pipeline_async": ["pipeline_async_4ranks_sleep"],
    "tensor_parallel": ["tensor_parallel_2ranks_stage0", "tensor_parallel_4ranks_stage3"],
    "qlora": ["qlora_1b"],
    "unit_cost": ["unit_cost_1ranks_stage3"],
}
"""Published documents of each kind of table."""

MEDIAN = {"value": 0.5, "low": 0.4, "high": 0.6}
TENSOR_PARALLEL: dict[str, Any] = {
    "zeroshard, s a step": MEDIAN,
    "torch, s a step": {"value": 2.0, "low": 1.0, "high": 3.0},
    "ratio zeroshard/torch": {"value": 0.25, "low": 0.125, "high": 0.375},
}


def document(rows: Any, **extra: Any) -> dict[str, Any]:
    """A document as a benchmark writes it."""
    return {
        "benchmark": "page/some",
        "command": "python benchmarks/some.py --ranks 2",
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "uncommitted_changes": False,
        "machine": {"cpu": "a processor", "cores": 2, "memory_gb": 8.0, "gpus": []},
        "versions": {"python": "3.11.7", "torch": "2.14.1", "deepspeed": None},
        "settings": {"ranks": 4, "tp": 2, "stage": 3},
        "rows": rows,
        **extra,
    }


def benchmark(name: str, *runs: suite.Run) -> suite.Benchmark:
    """A section whose table is that of tensor parallelism."""
    return suite.Benchmark(
        name=name, title=f"Title of {name}", text="Text.", runs=runs, kind="tensor_parallel"
    )


def run_of(folder: Path, name: str, lines: str, **times: float) -> suite.Run:
    """A run of a script of a few lines, which finds the path of its document as `path`."""
    script, path = folder / f"{name}.py", folder / "page" / f"{name}.json"
    given = json.dumps(document(TENSOR_PARALLEL))
    script.write_text(
        f"import json, os, pathlib, signal, sys, time\npath = pathlib.Path({str(path)!r})\n"
        f"given = {given!r}\n{lines}\n"
    )
    return suite.Run(name=name, command=str(script), start_s=times.get("start_s", 0.0))


WRITES = "path.write_text(given)"


def text_of(folder: Path) -> str:
    """The text of the page, without pictures and elements."""
    html = (folder / "page/index.html").read_text(encoding="utf-8")
    return re.sub(r"<svg.*?</svg>|<style.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)


# ------------------------------------------------------------------------------------ from given documents


def test_the_page_has_each_figure_and_below_it_how_it_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "some.json").write_text(json.dumps(document(TENSOR_PARALLEL)))
    some = benchmark("some", suite.Run(name="some", command="some.py", start_s=1))
    assert not page.write_page([some], folder)[0].problems
    text = text_of(tmp_path)
    for figure in ("tp 2, dp 2, stage 3", "0.500", "2.000", "0.250 [0.125, 0.375]"):
        assert figure in text
    facts = ("python benchmarks/some.py --ranks 2", "2026-01-02", "0123456", "a processor, 2 cores, 8.0 GB")
    for fact in (*facts, "python 3.11.7, torch 2.14.1"):
        assert fact in text


def test_the_page_is_the_same_when_it_is_drawn_again(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(json.dumps(document(TENSOR_PARALLEL)))
    some = benchmark("some", suite.Run(name="some", command="some.py", start_s=1))
    page.write_page([some], tmp_path)
    first = (tmp_path / "index.html").read_bytes()
    page.write_page([some], tmp_path)
    assert (tmp_path / "index.html").read_bytes() == first


def test_a_picture_has_the_color_of_the_text_around_it(tmp_path: Path) -> None:
    for is_ratio in (False, True):
        bar = plots.Bar(label="a label", median=documents.Median(0.5, 0.4, 0.6), is_own=True)
        picture = plots.svg(plots.Chart(bars=[bar], unit="seconds", is_ratio=is_ratio))
        assert "currentColor" in picture
        assert not re.search(rf"{plots.INK}|#000000|#ffffff", picture)
        assert ">a label<" in picture


def test_peers_that_are_not_installed_are_named(tmp_path: Path) -> None:
    skipped = {"deepspeed-3": "DeepSpeed is not installed"}
    (tmp_path / "page").mkdir()
    (tmp_path / "page/some.json").write_text(json.dumps(document(TENSOR_PARALLEL, skipped=skipped)))
    page.write_page([benchmark("some", suite.Run(name="some", command="", start_s=1))], tmp_path / "page")
    assert "Without deepspeed-3: DeepSpeed is not installed." in text_of(tmp_path)
    assert "Not installed, so absent: deepspeed." in text_of(tmp_path)


def test_a_document_without_a_field_is_named_and_the_others_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    less = {key: value for key, value in TENSOR_PARALLEL.items() if not key.startswith("ratio")}
    bare = {key: value for key, value in document(TENSOR_PARALLEL).items() if key != "machine"}
    for name, content in (("less", document(less)), ("bare", bare), ("whole", document(TENSOR_PARALLEL))):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text("[]")
    names = ("less", "bare", "broken", "list", "whole")
    found = page.write_page(
        [benchmark(name, suite.Run(name=name, command="", start_s=1)) for name in names], folder
    )
    problems = {section.name: "".join(section.problems) for section in found}
    assert "Expected the field rows/ratio zeroshard/torch in less.json" in problems["less"]
    assert "Expected the field machine in bare.json" in problems["bare"]
    assert "Expected JSON in broken.json" in problems["broken"]
    assert "Expected an object in list.json, got list" in problems["list"]
    assert not problems["whole"]
    assert "Title of whole" in text_of(tmp_path)
    assert "0.250 [0.125, 0.375]" in text_of(tmp_path)
    assert "Expected the field machine in bare.json" in text_of(tmp_path)


def test_outcomes_that_are_not_of_this_page_are_refused(tmp_path: Path) -> None:
    (tmp_path / running.OUTCOMES).write_text('[{"name": "some"}]')
    with pytest.raises(ValueError, match=r"Expected outcomes in outcomes\.json, got TypeError"):
        running.read_outcomes(tmp_path)


@pytest.mark.parametrize("kind", sorted(tables.TABLES))
def test_each_kind_has_a_table_and_a_picture_of_published_documents(kind: str) -> None:
    found = [documents.read(RESULTS / f"{name}.json") for name in PUBLISHED[kind]]
    table = tables.TABLES[kind](*found)
    assert table.rows
    assert {len(row) for row in table.rows} == {len(table.columns)}
    chart = plots.chart_of(table)
    assert {bar.is_own for bar in chart.bars} >= {True}
    assert all(bar.median.low <= bar.median.value <= bar.median.high for bar in chart.bars)


def test_rows_of_offload_on_a_gpu_have_shares_and_estimates_and_facts_come_last(tmp_path: Path) -> None:
    shape = {"size": "7B", "num_params": 7e9, "tokens": 8192, "tokens_per_s": 5000.0, "tflop_per_s": 200.0}
    row = shape | {"setting": "states on the host, early", "share": 0.95, "device_peak": 2.1e10, "host": 14e9}
    row["estimated"] = {"device": 2e10, "host": 13.5e9}
    peer = shape | {
        "setting": "torchao, CPUOffloadOptimizer",
        "device_peak": None,
        "host": None,
        "share": None,
    }
    path = tmp_path / "some.json"
    path.write_text(json.dumps(document([row, peer], facts={"link up, GB/s": 55.0})))
    table = tables.offload_gpu(documents.read(path))
    rows = table.rows
    label = "7.00 B, states on the host, early, 8,192 tokens"
    assert rows[0] == (label, "5,000 (0.950)", "200", "21.0 (20.0)", "14.0 (13.5)")
    assert rows[1] == ("7.00 B, torchao, CPUOffloadOptimizer, 8,192 tokens", "5,000", "200", "", "")
    assert rows[2] == ("link up, GB/s: 55.0", "", "", "", "")
    bars = plots.chart_of(table).bars
    assert [(bar.median.value, bar.is_own) for bar in bars] == [(5000.0, True), (5000.0, False)]


# --------------------------------------------------------------------------------------------- measuring


def test_a_benchmark_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    bad = run_of(tmp_path, "bad", "print('an error <of> the benchmark'); sys.exit(3)")
    good = run_of(tmp_path, "good", WRITES)
    found = [benchmark("bad", bad), benchmark("good", good)]
    assert page.make(found, None, tmp_path / "page", None) == 1
    text = text_of(tmp_path)
    assert "bad: failed; exit status 3; the last lines of its output:" in text
    assert "an error &lt;of&gt; the benchmark" in text
    assert "0.250 [0.125, 0.375]" in text
    assert page.make(found, "good", tmp_path / "page", None) == 0  # the failure of another call is kept
    assert "bad: failed; exit status 3" in text_of(tmp_path)


def test_a_benchmark_gets_the_place_of_its_document_and_its_rounds() -> None:
    run = suite.Run(name="some", command='some.py --seeds ""', start_s=10, rounds=20, round_s=2)
    assert run.arguments(1, "page") == ["some.py", "--seeds", "", "--rounds", "20", "--name", "page/some"]
    assert run.arguments(0.5, "page")[4] == "10"
    assert run.arguments(0.01, "page")[4] == str(suite.LEAST_ROUNDS)
    assert run.estimated_s(1) == 50
    assert run.estimated_s(0.5) == 30


def test_a_benchmark_that_takes_too_long_is_ended_with_its_processes(tmp_path: Path) -> None:
    lines = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    lines += "path.with_suffix('.pid').write_text(str(child.pid))\ntime.sleep(60)"
    (tmp_path / "page").mkdir()
    run = run_of(tmp_path, "slow", lines)
    outcome = running.run_one(run, tmp_path / "page", scale=1, limit_s=1.5)
    assert outcome.state == running.FAILED
    assert "it took more than the 2 s that were left" in outcome.message
    pid = int((tmp_path / "page/slow.pid").read_text())
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_a_benchmark_for_which_no_time_is_left_is_named(tmp_path: Path) -> None:
    long = benchmark("long", run_of(tmp_path, "long", WRITES, start_s=90.0))
    assert page.make([long], None, tmp_path / "page", 1.0) == 1
    assert "long: left out; 60 s were left, and it takes about 90 s: give more --minutes" in text_of(tmp_path)
    assert not (tmp_path / "page/long.json").exists()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Signal 2 raises KeyboardInterrupt, also in a process that had ignored it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_the_page_of_what_was_measured(tmp_path: Path) -> None:
    runs = {
        "done": WRITES,
        "stopped": "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)",
        "never": WRITES,
    }
    found = [benchmark(name, run_of(tmp_path, name, lines)) for name, lines in runs.items()]
    assert page.make(found, None, tmp_path / "page", None) == page.INTERRUPTED
    text = text_of(tmp_path)
    assert "0.250 [0.125, 0.375]" in text
    assert "stopped: stopped; it was stopped while it ran" in text
    assert re.search(r"Not measured\s+never\.", text)


@pytest.mark.long  # a process for each section imports torch and transformers
def test_a_section_of_offload_that_fails_is_named_and_the_others_are_there(tmp_path: Path) -> None:
    script, name = ROOT / "benchmarks/offload_gpu.py", tmp_path / "some"
    command = [sys.executable, str(script), "--part", "peers", "--name", str(name), "--device", "cpu"]
    command += ["--size", "tiny", "--sequence", "16", "--steps", "1"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=600)
    found = documents.read(name.with_suffix(".json"))
    assert [row["setting"] for row in found.field("rows")][:2] == [
        "all on the GPU",
        "states on the host, early",
    ]
    (reason,) = (reason for title, reason in found.skipped.items() if "torchao" in title)
    assert "CPU Offload currently only supports" in reason or "No module named" in reason


def test_each_section_of_offload_has_a_config_that_initialize_takes() -> None:
    import offload_gpu

    for part, sections in offload_gpu.PARTS.items():
        assert part in offload_gpu.MINUTES
        for section in sections:
            Config.parse(offload_gpu.config_of(section))


# ----------------------------------------------------------------------------------------------- the suite


def test_all_benchmarks_fit_in_twenty_minutes() -> None:
    planned = suite.budget(suite.CPU, suite.MINUTES)
    runs = [run for one in suite.CPU for run in one.runs]
    assert planned.limit_s == 20 * 60
    assert sum(run.estimated_s(planned.scale) for run in runs) <= 0.9 * planned.limit_s
    assert sum(run.estimated_s(1) for run in runs) <= 0.9 * planned.limit_s


def test_fewer_minutes_give_fewer_rounds_and_more_give_more() -> None:
    scales = [suite.budget(suite.CPU[:1], minutes).scale for minutes in (0.1, 2, 3, 10)]
    assert scales == sorted(scales)
    assert scales[0] == 0.0
    assert suite.budget(suite.CPU[:1], None).scale == 1.0
    ten = suite.budget(suite.CPU[:1], 10)
    assert suite.STEP_TIME.runs[0].estimated_s(ten.scale) == pytest.approx(600 * suite.MARGIN, abs=8)


@pytest.mark.parametrize("device", suite.SUITES)
def test_each_script_has_the_flags_that_it_is_given(device: str) -> None:
    shared = "".join((ROOT / f"benchmarks/{name}.py").read_text() for name in ("model", "pipeline"))
    names = [run.name for one in suite.SUITES[device] for run in one.runs]
    assert len(names) == len(set(names))
    for one in suite.SUITES[device]:
        assert one.table in tables.TABLES
        for run in one.runs:
            script, *arguments = run.arguments(1, "page")
            source = (ROOT / "benchmarks" / script).read_text() + shared
            for flag in (argument for argument in arguments if argument.startswith("--")):
                assert f'"{flag}"' in source, f"{script} {flag}"


def test_each_engine_that_a_script_is_given_exists() -> None:
    import engines
    import offload_engines

    known = {
        "step_time.py": engines.ENGINES,
        "rss.py": engines.ENGINES,
        "offload.py": offload_engines.ENGINES,
    }
    for one in (*suite.CPU, *suite.GPU):
        for run in one.runs:
            script, *arguments = run.arguments(1, "page")
            if "--engines" in arguments:
                names = arguments[arguments.index("--engines") + 1].split(",")
                assert not set(names) - set(known[script]), script


def test_unknown_benchmarks_and_times_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--only", "memory,speed"], "Expected benchmarks among step_time, memory"),
        (["--minutes", "0"], "Expected --minutes above 0, got 0"),
    ):
        with pytest.raises(SystemExit):
            page.parse(arguments)
        assert message in capsys.readouterr().err
    assert [one.name for one in suite.chosen(suite.CPU, "memory,step_time")] == ["step_time", "memory"]


# ------------------------------------------------------------------------------------- the tables of the docs


def test_the_tables_of_performance_are_those_of_the_documents() -> None:
    text = page.PERFORMANCE.read_text(encoding="utf-8")
    assert tables.fill(text, RESULTS, page.OF_DOCS) == text, "python benchmarks/page.py --tables writes them"


def test_the_tables_of_the_experiments_are_those_of_the_documents() -> None:
    text = page.EXPERIMENTS.read_text(encoding="utf-8")
    assert tables.fill(text, RESULTS, page.OF_DOCS) == text, "python benchmarks/page.py --tables writes them"
    rest = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    assert not re.search(r"^\|(?: *:?-+:? *\|)+$", rest, re.MULTILINE), "no table by hand"


def test_the_findings_of_the_experiments_name_figures_of_their_tables() -> None:
    text = page.EXPERIMENTS.read_text(encoding="utf-8")
    words = text.partition("## Findings")[2]
    cells = " ".join(re.findall(r"<!-- table: .*?<!-- end -->", text, re.DOTALL))
    figures = set(re.findall(r"\d[\d,]*\.\d+|\d,\d{3}", words)) - {"0.9", "0.1", "3.8"}  # of a formula
    assert len(figures) >= 10
    assert not [one for one in figures if not re.search(rf"(?<![\d.,]){re.escape(one)}(?!\d)", cells)]


def test_every_table_of_performance_is_made_of_documents() -> None:
    text = page.PERFORMANCE.read_text(encoding="utf-8")
    rest = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    by_hand = re.findall(r"^\|(?: *:?-+:? *\|)+$", rest, re.MULTILINE)
    assert len(by_hand) <= 1, "only the table of choices has no figures"
    assert len(re.findall(r"<!-- table: ", text)) == len(re.findall(r"<!-- end -->", text)) > 10


def test_a_table_of_a_page_is_filled_in_and_wrong_comments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(json.dumps(document(TENSOR_PARALLEL)))
    filled = tables.fill(
        "a\n<!-- table: tensor_parallel some -->\nold\n<!-- end -->\nb\n", tmp_path, page.OF_DOCS
    )
    assert "| tp 2, dp 2, stage 3 | 0.500 | 2.000 | 0.250 [0.125, 0.375] |" in filled
    assert "\n- [some.json](../benchmarks/results/some.json), torch " in filled
    assert "old" not in filled
    assert filled.startswith("a\n")
    assert filled.endswith("<!-- end -->\nb\n")
    assert tables.fill(filled, tmp_path, page.OF_DOCS) == filled
    with pytest.raises(ValueError, match=r"Expected a table among step_time, .* got speed"):
        tables.fill("<!-- table: speed some -->\n<!-- end -->", tmp_path, page.OF_DOCS)
    with pytest.raises(FileNotFoundError):
        tables.fill("<!-- table: memory other -->\n<!-- end -->", tmp_path, page.OF_DOCS)


def test_a_command_is_shown_without_the_folders_of_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    command = 'python benchmarks/some.py --folder /data/a --seeds "" --folder=/data/b --ranks 2'
    path.write_text(json.dumps(document([], command=command)))
    assert documents.read(path).command() == "python benchmarks/some.py --seeds '' --ranks 2"


def test_figures_have_three_digits_behind_the_point_and_large_ones_one() -> None:
    assert tables.interval(documents.Median(0.5984, 0.5, 9.9999)) == "0.598 [0.500, 10.000]"
    assert tables.interval(documents.Median(12.64, 12.1, 12.8)) == "12.6 [12.1, 12.8]"
    assert tables.seconds(documents.Median(0.05684, 0, 0)) == "0.0568"
    assert tables.megabytes(1_463_000_000) == "1,463"
