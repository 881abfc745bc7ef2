"""Pictures of tables of measurements: SVG whose text has the color of the page, for light and dark."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from medians import Median
from tables import OURS, Cell, Table

INK = "#123456"
"""A color that no bar has; in the SVG it becomes `currentColor`."""
OWN, PEER = "#2f9e6e", "#8a93a6"
"""Colors of zeroshard and of the others, with a contrast of 3 and more to white and to near black."""
PEERS = re.compile(
    "plain|torch|fsdp2|deepspeed|bitsandbytes|adamw, fused|sequential|DistributedDataParallel|DCP|all states",
    re.IGNORECASE,
)
"""In labels of rows and columns that are not those of zeroshard."""
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


def chart_of(table: Table) -> Chart:
    """The values of the columns that a table has for its picture."""
    titles = [table.columns[column] for column in table.drawn]
    is_ratio = "ratio" in titles[0] or " / " in titles[0]
    unit, is_one = titles[0].partition(" (")[0], len(titles) == 1
    if not is_one:
        unit = unit.partition(",")[0] if is_ratio else unit.rpartition(", ")[2]
    bars = []
    for row in table.rows:
        for column, title in zip(table.drawn, titles, strict=True):
            if isinstance(cell := row[column], Cell):
                label = row[0] if is_one else f"{row[0]}, {title}"
                is_own = is_ratio or label.startswith(OURS) or not PEERS.search(label)
                bars.append(Bar(label=label, median=cell.median, is_own=is_own))
    return Chart(bars=bars, unit=unit, is_ratio=is_ratio)


def svg(chart: Chart) -> str:
    """The picture as an element for HTML."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 0.7 + ROW * len(chart.bars)))
        _bars(axes, chart)
        axes.set_yticks(range(len(chart.bars)), [bar.label for bar in chart.bars])
        axes.invert_yaxis()
        axes.set_xlabel(chart.unit)
        return _written(figure)


def _bars(axes: Axes, chart: Chart) -> None:
    """A bar from 0 for each value, or a point for each ratio, with intervals."""
    medians = [bar.median for bar in chart.bars]
    places, values = range(len(medians)), [median.value for median in medians]
    errors = [[one.value - one.low for one in medians], [one.high - one.value for one in medians]]
    if chart.is_ratio:
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
        axes.errorbar(values, places, xerr=errors, fmt="o", color=OWN, elinewidth=1.5, capsize=3)
        axes.set_ylim(-0.6, len(medians) - 0.4)
    else:
        colors = [OWN if bar.is_own else PEER for bar in chart.bars]
        axes.barh(places, values, color=colors, height=0.7)
        axes.errorbar(values, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=1)


def _written(figure: Figure) -> str:
    """The SVG element, without the head of a file."""
    output = io.StringIO()
    figure.savefig(output, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = output.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
