"""Tables of measurements: a function for each kind of benchmark makes one of its JSON documents.

The page of `make bench` and `docs/performance.md` have the same tables. In a page of docs/ a table stands
between two comments; the first one names the kind and the files of `benchmarks/results/`:

    <!-- table: step_time step_time_2ranks_batch1 -->
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from documents import Document, read
from medians import Median

MEGABYTE, GIGABYTE = 1e6, 1e9
OURS = "zeroshard"
NONE = ""
"""The cell of a value that does not exist."""


@dataclass(frozen=True)
class Table:
    """Cells of text; the first column names the row."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    drawn: tuple[int, ...] = (1,)
    """The columns that a picture shows, of one unit."""

    def markdown(self) -> str:
        """The table in Markdown, with a line end."""
        rule = ("---", *("---:" for _ in self.columns[1:]))
        return "".join(f"| {' | '.join(row)} |\n" for row in (self.columns, rule, *self.rows))


# ------------------------------------------------------------------------------------------------ cells


class Cell(str):
    """The text of a value, and the value for a picture."""

    median: Median

    def __new__(cls, text: str, value: Median | float) -> Cell:
        cell = super().__new__(cls, text)
        cell.median = value if isinstance(value, Median) else Median(value, value, value)
        return cell


def number(value: float) -> Cell:
    """A number with three digits behind the point, or one from 10 on."""
    return Cell(f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}", value)


def seconds(median: Median) -> Cell:
    """A time without its interval."""
    return Cell(f"{median.value:.4f}" if median.value < 0.1 else f"{median.value:.3f}", median)


def interval(median: Median) -> Cell:
    """A median with its interval of 95%."""
    return Cell(f"{number(median.value)} [{number(median.low)}, {number(median.high)}]", median)


def megabytes(num_bytes: float) -> Cell:
    return Cell(f"{num_bytes / MEGABYTE:,.0f}", num_bytes / MEGABYTE)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / GIGABYTE:.1f}" if num_bytes else NONE


def against(num_bytes: float | None, estimated: float | None) -> str:
    """Gigabytes, and in brackets those of an estimate."""
    cell = gigabytes(num_bytes or 0)
    return f"{cell} ({gigabytes(estimated)})" if cell and estimated else cell


# ------------------------------------------------------------------------------------ tables by their kind


def step_time(document: Document) -> Table:
    """Seconds of a step of each engine, and the ratios of zeroshard's stages to it."""
    times = {one.field("engine"): one for one in document.each("rows", "times")}
    stages = [name for name in times if name.startswith(OURS)]
    ratios = {tuple(one.fields("engine", "peer")): one.median() for one in document.each("rows", "ratios")}
    rows = []
    for name, one in times.items():
        cells = [interval(ratios[stage, name]) if (stage, name) in ratios else NONE for stage in stages]
        rows.append((one.field("label"), seconds(one.median("median_s")), *cells))
    titles = (f"stage {stage.rpartition('-')[2]} / it" for stage in stages)
    return Table(("engine", "s a step", *titles), rows)


def memory(document: Document) -> Table:
    """Megabytes of model states of a rank: a column for each number of ranks."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for one in document.each("rows"):
        precision, stage, ranks = one.fields("precision", "stage", "ranks")
        held, share = one.field("live_tensor_bytes") / MEGABYTE, one.field("live_over_formula")
        found.setdefault((precision, stage), {})[ranks] = Cell(f"{held:.1f} ({share:.3f})", held)
    worlds = sorted({ranks for cells in found.values() for ranks in cells})
    columns = [f"{ranks} rank{'s' if ranks > 1 else ''}, MB" for ranks in worlds]
    rows = [
        (f"stage {stage}, {precision}", *(cells.get(ranks, NONE) for ranks in worlds))
        for (precision, stage), cells in found.items()
    ]
    return Table(("stage, precision", *columns), rows, drawn=(len(worlds),))


def rss(document: Document) -> Table:
    """Peak resident memory of a rank by engine."""
    rows = [
        (one.field("label"), megabytes(MEGABYTE * one.field("peak_rss_mb"))) for one in document.each("rows")
    ]
    return Table(("engine", "peak RSS, MB"), rows)


def checkpoint(document: Document) -> Table:
    """Seconds to save and to load, and the price of a save in the background."""
    rows = []
    for call in ("save", "load"):
        peer, own = (
            document.median_of("rows", "seconds", f"{call} {who}") for who in ("fsdp2", "zeroshard-3")
        )
        ratio = document.median("rows", "summary", f"{call}, ratio to DCP")
        rows.append((call, seconds(peer), seconds(own), interval(ratio)))
    call = document.median_of("rows", "seconds", "background call")
    ratio = document.median("rows", "summary", "background call, ratio to blocking save")
    rows.append(("the call with `blocking=False`, of a blocking save", NONE, seconds(call), interval(ratio)))
    for what in ("step beside a save", "step after a save"):
        ratio = document.median("rows", "summary", f"{what}, ratio to a step alone")
        rows.append((f"a {what}, of a step alone", NONE, NONE, interval(ratio)))
    return Table(("", "DCP with FSDP2, s", "zeroshard stage 3, s", "ratio"), rows, drawn=(1, 2))


def optimizers(document: Document) -> Table:
    """Seconds of a step of AdamW with 8-bit states, and the bytes of the states."""
    rows = [
        (
            one.field("optimizer"),
            seconds(one.median("median_s")),
            interval(one.median("ratio_to_fused")),
            number(one.field("state_bytes_per_parameter")),
        )
        for one in document.each("rows", "steps")
    ]
    return Table(("optimizer", "s a step", "ratio to torch's fused", "bytes of state a parameter"), rows)


def main_dtype(document: Document) -> Table:
    """Seconds of a step with main parameters of float32 and of bfloat16."""
    rows = [
        (
            ", ".join(one.fields("optimizer", "main_dtype")),
            seconds(one.median("median_s")),
            interval(one.median("ratio_to_fp32")),
        )
        for one in document.each("rows")
    ]
    return Table(("optimizer, main dtype", "s a step", "ratio to the same in fp32"), rows)


def muon(*documents: Document) -> Table:
    """Seconds of Muon's step with the matrices divided over the ranks, and with all of them on each."""
    rows = [
        (
            f"stage {one.field('settings', 'stage')}",
            seconds(one.median("rows", "owners, s a step")),
            seconds(one.median("rows", "everywhere, s a step")),
            interval(one.median("rows", "ratio owners/everywhere")),
            f"{max(one.field('rows', 'bytes that each rank sends in a step')):,}",
        )
        for one in documents
    ]
    columns = ("stage", "each matrix on one rank, s", "all matrices on every rank, s", "ratio", "bytes sent")
    return Table(columns, rows, drawn=(3,))


def nvme(document: Document) -> Table:
    """Speeds of the files that the nvme tier writes."""
    rows = []
    for what in document.field("rows", "summary"):
        cell = interval(document.median("rows", "summary", what))
        rows.append((what, cell if what.endswith("GB/s") else str(cell)))  # the picture has one unit
    return Table(("", "median"), rows)


def offload_rss(document: Document) -> Table:
    """Growth of the peak memory of a process, and its bound."""
    rows = []
    for one in document.each("rows"):
        case, num_params, *sizes = one.fields("case", "num_params", "states", "growth", "bound")
        rows.append((case, f"{num_params / 1e6:.0f} M", *map(megabytes, sizes)))
    return Table(
        ("setting", "parameters", "all states, MB", "growth of the peak, MB", "bound, MB"), rows, drawn=(2, 3)
    )


def offload_gpu(*documents: Document) -> Table:
    """Speeds and bytes of Llama shapes on a GPU; the rates of the machine and other facts come last."""
    rows, facts = [], []
    for one in documents:
        found = one.content.get("facts", {})
        facts += [(f"{name}: {fact}", *[NONE] * 4) for name, fact in found.items() if fact is not True]
        if num := sum(fact is True for fact in found.values()):
            facts.append((f"comparisons of bits without a difference: {num}", *[NONE] * 4))
        for own in one.each("rows"):
            size, setting, speed, flop, *held = own.fields(*_OF_GPU)
            row = own.content
            tokens = f", {row['tokens']:,} tokens" if "tokens" in row else ""  # older documents have one
            share = f" ({row['share']:.3f})" if row.get("share") else ""
            estimated = map(row.get("estimated", {}).get, ("device", "host"))
            bytes_of = (against(*pair) for pair in zip(held, estimated, strict=True))
            speeds = (Cell(f"{speed:,.0f}{share}", speed), f"{flop:.0f}")
            rows.append((f"{size / 1e9:.2f} B, {setting}{tokens}", *speeds, *bytes_of))
    columns = ("model, setting", "tokens/s (of all on the GPU)", "TFLOP/s")
    return Table((*columns, "GPU peak (estimate), GB", "host (estimate), GB"), rows + facts)


_OF_GPU = ("num_params", "setting", "tokens_per_s", "tflop_per_s", "device_peak", "host")


def pipeline(document: Document) -> Table:
    """Seconds of a step of each schedule, against torch's schedules and against the simulator."""
    schedules = document.field("rows")
    cuts = [
        cut
        for cut in ("model", "layers")
        if any(f"torch {cut}, s a step" in row for row in schedules.values())
    ]
    rows = []
    for name, row in schedules.items():
        keys = [f"ratio zeroshard/torch {cut}, {what}" for cut in cuts for what in ("a step", "of own work")]
        ratios = [interval(document.median("rows", name, key)) if key in row else NONE for key in keys]
        prediction = interval(document.median("rows", name, "ratio predicted/measured"))
        rows.append(
            (name, seconds(document.median("rows", name, "zeroshard, s a step")), *ratios, prediction)
        )
    titles = [f"{what} / torch, {cut}" for cut in cuts for what in ("step", "own work")]
    drawn = tuple(range(2, 2 + len(titles), 2))
    return Table(("schedule", "s a step", *titles, "predicted / measured"), rows, drawn=drawn)


def pipeline_async(document: Document) -> Table:
    """Steps a second of asynchronous methods, against 1F1B that is flushed and against the simulator."""
    rows = []
    for name, row in document.field("rows").items():
        ratio = prediction = bound = NONE
        if "bound of the ratio" in row:  # all but the flushed one
            bound = number(row["bound of the ratio"])
            ratio = interval(document.median("rows", name, "ratio of micro-batches a second to flushed"))
            prediction = interval(document.median("rows", name, "ratio predicted/measured"))
        speed = number(document.median("rows", name, "steps a second").value)
        rows.append((name, str(row["micro-batches a step"]), speed, ratio, bound, prediction))
    titles = ("micro-batches a step", "steps a second", "speed / flushed", "bound", "predicted / measured")
    return Table(("method", *titles), rows, drawn=(3,))


def tensor_parallel(*documents: Document) -> Table:
    """Seconds of a step over tensor ranks."""
    rows = []
    for one in documents:
        ranks, tensor, stage = (one.field("settings", key) for key in ("ranks", "tp", "stage"))
        own, peer = (one.median("rows", f"{who}, s a step") for who in (OURS, "torch"))
        ratio = interval(one.median("rows", "ratio zeroshard/torch"))
        rows.append((f"tp {tensor}, dp {ranks // tensor}, stage {stage}", seconds(own), seconds(peer), ratio))
    return Table(("ranks", "zeroshard, s a step", "torch, s a step", "ratio"), rows, drawn=(3,))


def qlora(document: Document) -> Table:
    """Memory of each rank that trains adapters over 4-bit weights."""
    size = document.field("rows", "parameters of the model") / 1e9
    rows = []
    for rank, one in enumerate(document.each("rows", "ranks")):
        held, peak, taken = one.fields("bytes of parameters", "peak bytes, trained", "s to shard")
        label = f"rank {rank}, {size:.2f} B parameters"
        rows.append((label, megabytes(held), megabytes(peak), number(taken)))
    columns = ("", "bytes of parameters, MB", "peak RSS, MB", "s to build and shard")
    return Table(columns, rows, drawn=(1, 2))


def unit_cost(*documents: Document) -> Table:
    """Microseconds of the host for each unit, beyond plain PyTorch."""
    rows = []
    for one in documents:
        own, peer = (one.median("rows", f"{who}, us a unit beyond plain") for who in (OURS, "fsdp2"))
        settings = one.field("settings")
        ratio = interval(one.median("rows", "ratio zeroshard/fsdp2"))
        cells = [Cell(f"{cost.value:.0f}", cost) for cost in (own, peer)]
        what = "passes in bf16" if settings.get("passes") else "whole steps"
        rows.append((f"{settings['ranks']} rank{'s' * (settings['ranks'] > 1)}, {what}", *cells, ratio))
    return Table(("", "zeroshard, us a unit", "FSDP2, us a unit", "ratio"), rows, drawn=(1, 2))


def experts(*documents: Document) -> Table:
    """Tokens a second of models with experts, by the way that transformers runs them."""
    cells: dict[str, list[str]] = {}
    columns = ["trained by"]
    for one in documents:
        columns += [f"{kind}, ranks: {one.field('settings', 'ranks')}" for kind in ("eager", "grouped_mm")]
        for row in one.field("rows"):
            cells.setdefault(row["trained by"], []).append(Cell(f"{row['tokens/s']:,}", row["tokens/s"]))
    return Table(tuple(columns), [(name, *of_row) for name, of_row in cells.items()])


TABLES: dict[str, Callable[..., Table]] = {
    made.__name__: made
    for made in (
        *(step_time, memory, rss, checkpoint, optimizers, main_dtype, muon, nvme, offload_rss),
        *(offload_gpu, pipeline, pipeline_async, tensor_parallel, qlora, unit_cost, experts),
    )
}

# -------------------------------------------------------------------------------- tables in pages of docs

_MARKED = re.compile(r"(<!-- table: (\w+)((?: \w+)+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def caption(document: Document) -> str:
    """The file of a run, which has its command and its commit: an item of a list, with a link from docs/."""
    link = f"[{document.path.name}](../benchmarks/results/{document.path.name})"
    return f"- {link}, torch {document.field('versions', 'torch')}, {document.day()}\n"


def fill(text: str, results: Path, kinds: Mapping[str, Callable[..., Table]]) -> str:
    """The page with each table made anew from the documents in `results`.

    Args:
        kinds: the function that makes each kind of table.

    Raises:
        ValueError: a comment names an unknown kind, or a document has not the fields of its kind.
        FileNotFoundError: a document is not there.
    """

    def table(match: re.Match[str]) -> str:
        opening, kind, names, _, end = match.groups()
        if kind not in kinds:
            raise ValueError(f"Expected a table among {', '.join(kinds)}, got {kind}")
        documents = [read(results / f"{name}.json") for name in names.split()]
        captions = "".join(map(caption, documents))
        return f"{opening}\n{kinds[kind](*documents).markdown()}\n{captions}\n{end}"

    return _MARKED.sub(table, text)
