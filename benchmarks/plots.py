"""Pictures of measurements: SVG whose text has the color of the page, so that it reads on light and dark.

Like the tables, a picture is made of JSON documents alone, by the kind of its benchmark.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from documents import Document
from medians import Median
from tables import MEGABYTE, OURS

INK = "#123456"
"""A color that no bar has; in the SVG it becomes `currentColor`."""
OWN, PEER = "#2f9e6e", "#8a93a6"
"""Colors of zeroshard and of the others, with a contrast of 3 and more to white and to near black."""
STYLE = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 9,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "zeroshard",  # the same picture is the same file
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
ROW, WIDTH = 0.28, 7.2
"""Inches."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A measured value of a row of the picture."""

    label: str
    median: Median
    is_own: bool
    """True for zeroshard."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows of bars, or of points around 1."""

    bars: list[Bar]
    unit: str
    """The label of the axis."""
    is_ratio: bool = False
    """True for points with intervals and a line at 1, which means equal."""


# --------------------------------------------------------------------------------- values of each benchmark


def step_time(document: Document) -> Chart:
    """Seconds of each engine."""
    rows = range(document.length("rows", "times"))
    bars = [
        Bar(
            label=document.field("rows", "times", i, "label"),
            median=document.median("rows", "times", i, "median_s"),
            is_own=document.field("rows", "times", i, "engine").startswith(OURS),
        )
        for i in rows
    ]
    return Chart(bars=bars, unit="seconds a step")


def memory(document: Document) -> Chart:
    """Bytes of model states of a rank, at the largest number of ranks in float32."""
    found = [document.field("rows", i) for i in range(document.length("rows"))]
    most = max(document.field("rows", i, "ranks") for i in range(len(found)))
    bars = [
        Bar(
            label=f"stage {document.field('rows', i, 'stage')}, {document.field('rows', i, 'precision')}",
            median=_exact(document.field("rows", i, "live_tensor_bytes") / MEGABYTE),
            is_own=True,
        )
        for i, row in enumerate(found)
        if row["ranks"] == most
    ]
    return Chart(bars=bars, unit=f"MB of a rank, {most} ranks")


def rss(document: Document) -> Chart:
    """Peak memory of each engine."""
    bars = [
        Bar(
            label=document.field("rows", i, "label"),
            median=_exact(document.field("rows", i, "peak_rss_mb")),
            is_own=document.field("rows", i, "engine").startswith(OURS),
        )
        for i in range(document.length("rows"))
    ]
    return Chart(bars=bars, unit="MB, peak of a rank")


def checkpoint(document: Document) -> Chart:
    """Seconds to save and to load."""
    bars = [
        Bar(
            label=f"{call}, {label}",
            median=document.median_of("rows", "seconds", f"{call} {key}"),
            is_own=key != "fsdp2",
        )
        for call in ("save", "load")
        for key, label in (("fsdp2", "DCP with FSDP2"), ("zeroshard-3", "zeroshard stage 3"))
    ]
    return Chart(bars=bars, unit="seconds")


def optimizers(document: Document) -> Chart:
    """Seconds of a step of each optimizer."""
    bars = [
        Bar(
            label=document.field("rows", "steps", i, "optimizer"),
            median=document.median("rows", "steps", i, "median_s"),
            is_own=document.field("rows", "steps", i, "optimizer").startswith(OURS),
        )
        for i in range(document.length("rows", "steps"))
    ]
    return Chart(bars=bars, unit="seconds a step")


def main_dtype(document: Document) -> Chart:
    """Seconds of a step with each dtype."""
    bars = [
        Bar(
            label=f"{document.field('rows', i, 'optimizer')}, {document.field('rows', i, 'main_dtype')}",
            median=document.median("rows", i, "median_s"),
            is_own=document.field("rows", i, "optimizer") == "AdamW8bit",
        )
        for i in range(document.length("rows"))
    ]
    return Chart(bars=bars, unit="seconds a step")


def muon(*documents: Document) -> Chart:
    """Ratios of divided steps to whole ones."""
    bars = [
        Bar(
            label=f"stage {one.field('settings', 'stage')}",
            median=one.median("rows", "ratio owners/everywhere"),
            is_own=True,
        )
        for one in documents
    ]
    return Chart(bars=bars, unit="each matrix on one rank / all on every rank", is_ratio=True)


def nvme(document: Document) -> Chart:
    """Speeds."""
    bars = [
        Bar(
            label=name,
            median=document.median("rows", "summary", f"{name}, GB/s"),
            is_own=name != "sequential",
        )
        for name in ("optimizer step", "sequential")
    ]
    return Chart(bars=bars, unit="GB/s")


def offload(document: Document) -> Chart:
    """Seconds of each setting."""
    peers = ("deepspeed", "fsdp2", "torchao")
    bars = [
        Bar(
            label=document.field("rows", i, "engine"),
            median=document.median("rows", i, "median_s"),
            is_own=not document.field("rows", i, "engine").startswith(peers),
        )
        for i in range(document.length("rows"))
    ]
    return Chart(bars=bars, unit="seconds a step")


def offload_rss(document: Document) -> Chart:
    """Growth, beside all states."""
    bars = [
        Bar(
            label=f"{document.field('rows', i, 'case')}, {label}",
            median=_exact(document.field("rows", i, key) / MEGABYTE),
            is_own=key == "growth",
        )
        for i in range(document.length("rows"))
        for key, label in (("states", "all states"), ("growth", "growth of the peak"))
    ]
    return Chart(bars=bars, unit="MB")


def offload_gpu(*documents: Document) -> Chart:
    """Tokens a second."""
    bars = []
    for one in documents:
        for i in range(one.length("rows")):
            size, setting, speed = (one.field("rows", i, key) for key in ("size", "setting", "tokens_per_s"))
            tokens = one.field("rows", i).get("tokens")  # older documents have one number for all rows
            label = f"{size}, {setting}" + (f", {tokens:,} tokens" if tokens else "")
            is_own = not setting.startswith(("DeepSpeed", "FSDP2", "torchao"))
            bars.append(Bar(label=label, median=_exact(speed), is_own=is_own))
    return Chart(bars=bars, unit="tokens a second")


def pipeline(document: Document) -> Chart:
    """Ratios of steps to those of torch."""
    bars = [
        Bar(
            label=f"{name} / torch, {cut}",
            median=document.median("rows", name, f"ratio zeroshard/torch {cut}, a step"),
            is_own=True,
        )
        for name, row in document.field("rows").items()
        for cut in ("model", "layers")
        if f"ratio zeroshard/torch {cut}, a step" in row
    ]
    return Chart(bars=bars, unit="step of zeroshard / step of torch", is_ratio=True)


def pipeline_async(document: Document) -> Chart:
    """Micro-batches a second against 1F1B that is flushed."""
    key = "ratio of micro-batches a second to flushed"
    bars = [
        Bar(label=name, median=document.median("rows", name, key), is_own=True)
        for name, row in document.field("rows").items()
        if key in row
    ]
    return Chart(bars=bars, unit="micro-batches a second / those of 1F1B, flushed", is_ratio=True)


def tensor_parallel(*documents: Document) -> Chart:
    """Ratios of steps to those of torch."""
    bars = [
        Bar(
            label=f"{one.field('settings', 'ranks')} ranks, stage {one.field('settings', 'stage')}",
            median=one.median("rows", "ratio zeroshard/torch"),
            is_own=True,
        )
        for one in documents
    ]
    return Chart(bars=bars, unit="step of zeroshard / step of torch", is_ratio=True)


def profile_cost(document: Document) -> Chart:
    """Ratios of steps in a profile to steps without."""
    bars = [
        Bar(label=label, median=document.median("rows", f"ratio {way}/off"), is_own=True)
        for way, label in (("on", "in a profile"), ("without memory", "without memory"))
    ]
    return Chart(bars=bars, unit="step in a profile / step without", is_ratio=True)


def qlora(document: Document) -> Chart:
    """Bytes of parameters of each rank, and its peak."""
    bars = [
        Bar(
            label=f"rank {i}, {label}",
            median=_exact(document.field("rows", "ranks", i, key) / MEGABYTE),
            is_own=True,
        )
        for i in range(document.length("rows", "ranks"))
        for key, label in (("bytes of parameters", "parameters"), ("peak bytes, trained", "peak RSS"))
    ]
    return Chart(bars=bars, unit="MB")


def unit_cost(*documents: Document) -> Chart:
    """Microseconds of each library."""
    bars = [
        Bar(
            label=f"{label}, {one.field('settings', 'ranks')} ranks",
            median=one.median("rows", f"{key}, us a unit beyond plain"),
            is_own=key == OURS,
        )
        for one in documents
        for key, label in (("fsdp2", "FSDP2"), (OURS, OURS))
    ]
    return Chart(bars=bars, unit="microseconds a unit")


def _exact(value: float) -> Median:
    """A value without an interval."""
    return Median(value, value, value)


CHARTS: dict[str, Callable[..., Chart]] = {
    made.__name__: made
    for made in (
        *(step_time, memory, rss, checkpoint, optimizers, main_dtype, muon, nvme, offload, offload_rss),
        *(offload_gpu, pipeline, pipeline_async, tensor_parallel, profile_cost, qlora, unit_cost),
    )
}

# ------------------------------------------------------------------------------------------------- drawing


def svg(chart: Chart) -> str:
    """The picture as an element for HTML."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 0.7 + ROW * len(chart.bars)))
        (_points if chart.is_ratio else _bars)(axes, chart.bars)
        axes.set_yticks(range(len(chart.bars)), [bar.label for bar in chart.bars])
        axes.invert_yaxis()
        axes.set_xlabel(chart.unit)
        return _written(figure)


def _bars(axes: Axes, bars: Sequence[Bar]) -> None:
    """A bar from 0 for each value, and its interval."""
    errors = _errors(bars)
    colors = [OWN if bar.is_own else PEER for bar in bars]
    axes.barh(range(len(bars)), [bar.median.value for bar in bars], color=colors, height=0.7)
    axes.errorbar(
        [bar.median.value for bar in bars],
        range(len(bars)),
        xerr=errors,
        fmt="none",
        ecolor=INK,
        elinewidth=1,
    )


def _points(axes: Axes, bars: Sequence[Bar]) -> None:
    """A point with its interval for each ratio."""
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
    values = [bar.median.value for bar in bars]
    axes.errorbar(values, range(len(bars)), xerr=_errors(bars), fmt="o", color=OWN, elinewidth=1.5, capsize=3)
    axes.set_ylim(-0.6, len(bars) - 0.4)


def _errors(bars: Sequence[Bar]) -> list[list[float]]:
    """Distances of the bounds of the intervals, below and above."""
    return [
        [bar.median.value - bar.median.low for bar in bars],
        [bar.median.high - bar.median.value for bar in bars],
    ]


def _written(figure: Figure) -> str:
    """The SVG element, without the head of a file."""
    output = io.StringIO()
    figure.savefig(output, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = output.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
