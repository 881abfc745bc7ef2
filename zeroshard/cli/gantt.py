"""Charts of a schedule over time: text for a terminal, or a picture by matplotlib.

rank 0  F0─F1─······B0────B1────        a letter for the kind of action, the micro-batch, and its duration;
rank 1  ···F0─B0────F1─B1────···        points while a rank waits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zeroshard.parallel.pipeline.actions import COMPUTE, Action, Kind, Schedule
from zeroshard.parallel.pipeline.simulate import ScheduleTimes

WIDTH = 100
"""The most characters of a line, as in tables, where the terminal is not wider."""

_COLORS = {
    Kind.FORWARD: ("tab:blue", "forward"),
    Kind.BACKWARD: ("tab:green", "backward"),
    Kind.INPUT_GRADIENT: ("tab:olive", "gradient of the input"),
    Kind.WEIGHT_GRADIENT: ("tab:cyan", "gradient of the weights"),
    Kind.RECOMPUTE: ("tab:orange", "recompute"),
    Kind.STEP: ("tab:red", "step"),
}
_MAX_NUMBERED = 60  # actions a rank; in the bars of more the numbers would not be legible


class Chart(NamedTuple):
    """A schedule with its name and its times."""

    name: str
    schedule: Schedule
    timeline: ScheduleTimes
    weights: str = "stash"
    """The weights of its actions, by their name in the config; a list of the user's keeps versions."""


def draw_text(chart: Chart, width: int = WIDTH) -> str:
    """Return a line for each pipeline rank, in which time runs to the right.

    An action has room for its name if the chart then fits in `width` characters; else it is a letter alone.
    """
    schedule, timeline = chart.schedule, chart.timeline
    heads = [f"rank {rank}".ljust(6 + len(str(schedule.num_ranks - 1))) for rank in range(schedule.num_ranks)]
    durations = [span.end - span.start for spans in timeline.spans for span in spans if span.end > span.start]
    if not durations:
        return f"{chart.name}: no action takes time"
    longest = max(len(_label(action, schedule, rank)) for rank, action in schedule if action.is_compute)
    shortest = min(durations)
    cell = min(longest + 1, (width - len(heads[0]) - 1) * shortest / timeline.makespan)
    scale = (int(cell) if cell >= 1 else cell) / shortest  # whole cells look alike
    lines = [f"{chart.name}: time runs from 0 to {timeline.makespan:g}"]
    for rank, (head, spans) in enumerate(zip(heads, timeline.spans, strict=True)):
        cells = ["·"] * round(timeline.makespan * scale)
        for span in spans:
            first, end = round(span.start * scale), round(span.end * scale)
            cells[first:end] = _cell(span.action, _label(span.action, schedule, rank), end - first)
        lines.append(f"{head} {''.join(cells)}")
    return "\n".join(lines)


def _label(action: Action, schedule: Schedule, rank: int) -> str:
    """Return the text of an action; without the chunk where the rank has only one."""
    text = str(action)
    return text if len(schedule.chunks[rank]) > 1 else text.lstrip("0123456789")


def _cell(action: Action, label: str, width: int) -> str:
    text = label if len(label) <= width else action.kind.value[0]
    return text.ljust(width, "─")[:width]


def save_picture(path: str, charts: Sequence[Chart]) -> None:
    """Write a picture of several schedules, one above the other, with the same scale of time.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the kind of file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError("--plot with a file needs matplotlib: pip install zeroshard[plot]") from None
    rows = sum(chart.schedule.num_ranks for chart in charts)
    figure = Figure(figsize=(12, 1.2 * len(charts) + 0.35 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [chart.schedule.num_ranks for chart in charts]
    grid = figure.subplots(len(charts), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for axes, chart in zip(grid[:, 0], charts, strict=True):
        _draw_bars(axes, chart)
    grid[-1, 0].set_xlabel("time")
    shown = {action.kind for chart in charts for _, action in chart.schedule if action.kind in _COLORS}
    patches = [Patch(color=color, label=label) for kind, (color, label) in _COLORS.items() if kind in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Any, chart: Chart) -> None:
    """Draw a bar for each action that takes time, on axes of matplotlib."""
    for rank, spans in enumerate(chart.timeline.spans):
        timed = [span for span in spans if span.end > span.start and span.action.kind in _COLORS]
        for span in timed:
            color, _ = _COLORS[span.action.kind]
            chunks = chart.schedule.chunks[rank]
            # Later chunks of a rank are paler, so that the way of a micro-batch can be followed.
            place = 0 if span.action.chunk is None else chunks.index(span.action.chunk)
            axes.barh(
                rank,
                span.end - span.start,
                left=span.start,
                height=0.9,
                color=color,
                alpha=1 - 0.5 * place / len(chunks),
                edgecolor="white",
                linewidth=0.5,
            )
            if len(timed) <= _MAX_NUMBERED and span.action.kind in COMPUTE:
                middle = (span.start + span.end) / 2
                axes.text(middle, rank, str(span.action.microbatch), ha="center", va="center", fontsize=7)
    ranks = range(chart.schedule.num_ranks)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    timeline = chart.timeline
    axes.set_title(
        f"{chart.name}: {timeline.makespan:g}, bubble {timeline.bubble_share:.1%}", loc="left", fontsize=10
    )
