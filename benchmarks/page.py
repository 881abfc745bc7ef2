"""One page of all measurements: run the benchmarks of a suite, and draw tables and pictures of their JSON.

    python benchmarks/page.py                                     # all, at most 20 minutes on 2 cores
    python benchmarks/page.py --only step_time,memory --minutes 5
    python benchmarks/page.py --device cuda                       # the suite for a GPU
    python benchmarks/page.py --redraw                            # only draw what was measured
    python benchmarks/page.py --tables                            # the tables of pages of docs/

The page is `benchmarks/results/page/index.html` (`page_cuda` for a GPU), beside the JSON documents that it is
made of. A benchmark that fails does not stop the others: the page tells its error, and the exit status is 1.
Ctrl-C, or signal 15, ends the benchmark that runs; the page then has what was measured so far.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from markupsafe import Markup

import asynchronous_report
import plots
import record
import tables
from documents import Document, read
from running import LEFT_OUT, MEASURED, Outcome, read_outcomes, run_all
from suite import MINUTES, SUITES, Benchmark, budget, chosen

OF_DOCS = {
    **tables.TABLES,
    "asynchronous": asynchronous_report.quality,
    "asynchronous_times": asynchronous_report.times,
    "asynchronous_ranks": asynchronous_report.on_ranks,
}
"""The kinds of tables in pages of docs/."""
TEMPLATE = Path(__file__).parent / "page.html"
PERFORMANCE = Path(__file__).parent.parent / "docs" / "performance.md"
EXPERIMENTS = PERFORMANCE.with_name("asynchronous_experiments.md")
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=tuple(SUITES), default="cpu", help="the suite; default cpu")
    parser.add_argument("--only", help="comma-separated names of benchmarks; default all")
    parser.add_argument(
        "--minutes", type=float, help=f"for all together; rounds change with it; default {MINUTES:g}"
    )
    parser.add_argument("--redraw", action="store_true", help="only draw the page of what was measured")
    parser.add_argument("--tables", action="store_true", help="only write the tables of pages of docs/")
    args = parser.parse_args(arguments)
    try:
        chosen(SUITES[args.device], args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.minutes is not None and not args.minutes > 0:
        parser.error(f"Expected --minutes above 0, got {args.minutes:g}")
    return args


@dataclass(kw_only=True)
class Section:
    """A benchmark on the page."""

    name: str
    title: str
    text: str
    documents: list[Document] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Failed runs, and documents that cannot be read."""
    table: tables.Table | None = None
    svg: Markup = field(default_factory=Markup)

    @property
    def skipped(self) -> dict[str, str]:
        """The engines that were left out, with the reasons."""
        return {name: reason for one in self.documents for name, reason in one.skipped.items()}

    @property
    def is_empty(self) -> bool:
        """True if nothing was measured, nor tried."""
        return not self.documents and not self.problems


def section_of(benchmark: Benchmark, folder: Path, outcomes: dict[str, Outcome]) -> Section:
    """The section of a benchmark: its documents with their table and picture, and the problems it had."""
    section = Section(name=benchmark.name, title=benchmark.title, text=benchmark.text)
    for run in benchmark.runs:
        outcome = outcomes.get(run.name)
        path = folder / f"{run.name}.json"
        if outcome is not None and outcome.state != MEASURED:
            older = (
                " Figures below are of an earlier run." if path.exists() and outcome.state == LEFT_OUT else ""
            )
            section.problems.append(f"{run.name}: {outcome.state}; {outcome.message}{older}")
        try:
            if path.exists():
                section.documents.append(read(path))
        except ValueError as error:
            section.problems.append(str(error))
    if section.documents:
        try:
            section.table = tables.TABLES[benchmark.table](*section.documents)
            section.svg = Markup(plots.svg(plots.chart_of(section.table)))
            for one in section.documents:  # the template shows these
                _ = one.machine(), one.versions(), one.commit(), one.day(), one.command()
        except ValueError as error:
            section.problems.append(str(error))
            section.documents, section.table, section.svg = [], None, Markup()
    return section


def write_page(suite: Sequence[Benchmark], folder: Path) -> list[Section]:
    """Draw the page of all documents and outcomes in `folder`; return its sections."""
    outcomes = read_outcomes(folder)
    sections = [section_of(benchmark, folder, outcomes) for benchmark in suite]
    documents = [document for section in sections for document in section.documents]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        sections=[section for section in sections if not section.is_empty],
        unmeasured=[section.name for section in sections if section.is_empty],
        outcomes=list(outcomes.values()),
        absent=list(dict.fromkeys(name for document in documents for name in document.absent)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(text, encoding="utf-8")
    return sections


def write_tables(page: Path, results: Path) -> bool:
    """Write the tables of a page of docs/ anew; return True if it has changed."""
    before = page.read_text(encoding="utf-8")
    after = tables.fill(before, results, OF_DOCS)
    page.write_text(after, encoding="utf-8")
    return after != before


def make(suite: Sequence[Benchmark], only: str | None, folder: Path, minutes: float | None) -> int:
    """Measure the chosen benchmarks and write the page of all; return the exit status.

    Args:
        only: the chosen ones, as in `suite.chosen`.
        folder: for documents, outcomes and the page.
        minutes: for all that are measured now, as in `suite.budget`.
    """
    console = record.console()
    benchmarks = chosen(suite, only)
    was_whole = run_all(benchmarks, folder, budget(benchmarks, minutes), console)
    sections = write_page(suite, folder)
    names = {benchmark.name for benchmark in benchmarks}
    problems = [problem for one in sections if one.name in names for problem in one.problems]
    for problem in problems:
        console.print(problem, markup=False)
    console.print(f"wrote index.html in {folder.name}")
    if not was_whole:
        return INTERRUPTED
    return int(bool(problems))


def main() -> int:
    """Measure and draw, or only draw, or write the tables of the documentation."""
    args = parse()
    if args.tables:
        for one in (PERFORMANCE, EXPERIMENTS):
            changed = write_tables(one, record.RESULTS)
            record.console().print(f"{one.name}: {'new tables' if changed else 'nothing new'}")
        return 0
    folder = record.RESULTS / ("page" if args.device == "cpu" else f"page_{args.device}")
    suite = SUITES[args.device]
    if args.redraw:
        return int(any(section.problems for section in write_page(suite, folder)))
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first one
        signal.signal(number, signal.default_int_handler)
    return make(suite, args.only, folder, args.minutes)


if __name__ == "__main__":
    sys.exit(main())
