"""A picture of memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeroshard.profiling.memory import KINDS, Peak, Sample
from zeroshard.tables import format_bytes

_GIB = 1 << 30
_MOST_NAMES = 4
"""Gathered units that the mark of the peak names."""


def draw_memory(samples: Sequence[Sample], peak: Peak, path: Path) -> None:
    """Draw the bytes of each kind over time, one above the other.

    Args:
        samples: the samples, in the order of time.
        peak: the sample that is marked.
        path: the picture; its ending tells the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot_memory() needs matplotlib: pip install zeroshard[plot]") from None
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    times = [sample.seconds for sample in samples]
    values = [[sample.kinds[kind] / _GIB for sample in samples] for kind in KINDS]
    axes.stackplot(times, values, labels=KINDS, step="post")
    at, top = peak.sample.seconds, peak.sample.total / _GIB
    axes.plot([at], [top], "k.")
    side = "right" if at > (times[0] + times[-1]) / 2 else "left"
    axes.annotate(describe_peak(peak), (at, top), (0, 12), textcoords="offset points", fontsize=8, ha=side)
    axes.set(xlabel="s", ylabel="GiB", ylim=(0, 1.25 * top), xlim=(times[0], times[-1]))
    figure.legend(loc="outside right upper", reverse=True)
    FigureCanvasAgg(figure).print_figure(path)


def describe_peak(peak: Peak) -> str:
    """Name the phase of the peak and all that is alive there, in two lines."""
    phase = peak.sample.phase
    where = f"{phase.kind} {phase.name}".strip()
    kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in peak.sample.kinds.items() if n)
    names = list(peak.units[:_MOST_NAMES])
    if more := len(peak.units) - len(names):
        names.append(f"{more} more")
    gathered = f"; gathered: {', '.join(names)}" if names else ""
    return f"{format_bytes(peak.sample.total)} in {where}{gathered}\n{kinds}"
