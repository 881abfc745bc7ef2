"""The tables and the pictures of benchmarks/asynchronous.py, made of its documents alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documents import Document
from tables import NONE, Table

LARGE, SCALED, OWN = SETTINGS = ("large", "scaled", "own")
"""The settings of the hyperparameters."""
TARGETS = {"digits": ("accuracy", 0.95), "text": ("loss", 2.6)}
"""By task, what is reported of held-out samples, and the value to which the time is taken."""
LIMITS = {"digits": (0.0, 1.0), "text": (2.4, 3.2)}
"""Of the pictures; runs that go astray leave them."""
LAST_LOOKS = 3
"""Evaluations at the end of a run whose mean is reported: a fifth of them."""
SHOWN = {
    "gpipe": ("GPipe, 8 a step", "#9a9a9a"),
    "1f1b": ("1F1B, 8 a step", "#000000"),
    "2bw": ("2BW, 8 a step", "#8c564b"),
    "paci": ("PACI, 8 a step", "#e377c2"),
    "one": ("1F1B, 1 a step", "#000000"),
    "pb": ("PB", "#d62728"),
    "pipedream": ("PipeDream", "#1f77b4"),
    "spectrain": ("SpecTrain", "#2ca02c"),
    "pipemare": ("PipeMare", "#ff7f0e"),
    "lwp": ("LWP", "#9467bd"),
    "lwp+sc": ("LWP + SC", "#17becf"),
}
"""The title and the colour of each method."""
TITLES = {name: title for name, (title, _) in SHOWN.items()}


@dataclass(frozen=True)
class Seeds:
    """The runs of a method that differ in their seeds alone."""

    rows: list[Mapping[str, Any]]

    @property
    def ended(self) -> list[Mapping[str, Any]]:
        """Those that did not diverge."""
        return [row for row in self.rows if row["diverged_at"] is None]

    def last(self, what: str) -> list[float]:
        """A value of each run that has not diverged: the mean of its last evaluations, which are noisy."""
        return [statistics.fmean(look[what] for look in row["looks"][-LAST_LOOKS:]) for row in self.ended]

    def means(self, what: str) -> list[float]:
        """A value at each evaluation, over the seeds; none if a run diverged."""
        if len(self.ended) < len(self.rows):
            return []
        number = min(len(row["looks"]) for row in self.rows)
        return [statistics.fmean(row["looks"][i][what] for row in self.rows) for i in range(number)]


def _grouped(*documents: Document) -> dict[tuple[str, int, str], Seeds]:
    """The runs by method, ranks and setting."""
    found: dict[tuple[str, int, str], Seeds] = {}
    for one in documents:
        for row in one.field("rows"):
            key = row["method"], row["ranks"], row["setting"]
            found.setdefault(key, Seeds([])).rows.append(row)
    return found


def _columns(document: Document) -> tuple[list[str], list[int]]:
    """The methods and the depths."""
    groups = _grouped(document)
    return list(dict.fromkeys(one for one, _, _ in groups)), sorted({ranks for _, ranks, _ in groups})


def _shown(seeds: Seeds | None, what: str) -> str:
    """The mean over the seeds with the least and the largest value, and how many runs diverged."""
    if seeds is None:
        return NONE
    values, lost = seeds.last(what), len(seeds.rows) - len(seeds.ended)
    if not values:
        return "diverged"
    factor, digits = (100, 1) if what == "accuracy" else (1, 3)
    mean, low, high = (
        f"{factor * one:.{digits}f}" for one in (statistics.fmean(values), min(values), max(values))
    )
    note = f", {lost} of {len(seeds.rows)} diverged" if lost else ""
    return f"{mean} [{low}, {high}]{note}"


def quality(*documents: Document) -> Table:
    """The accuracy or the loss on held-out samples at the end."""
    task = documents[0].field("rows", 0, "task")
    what, _ = TARGETS[task]
    groups = _grouped(*documents)
    methods, _ = _columns(documents[0])
    unit = "accuracy, %" if what == "accuracy" else "loss, nats a byte"
    settings = _settings(groups)
    rows = [
        (TITLES[name], *(_shown(groups.get((name, *setting)), what) for setting in settings))
        for name in methods
    ]
    titles = (f"{setting} rate, {ranks} ranks" for ranks, setting in settings)
    return Table((f"{task}: {unit}", *titles), rows)


def _settings(groups: Iterable[tuple[str, int, str]]) -> list[tuple[int, str]]:
    """The depths and settings that runs have, those of large rates first."""
    found = {(ranks, setting) for _, ranks, setting in groups}
    return sorted(found, key=lambda one: (SETTINGS.index(one[1]), one[0]))


def _time_to_target(seeds: Seeds, task: str) -> float | None:
    """The simulated time at which the mean over the seeds has the target; None: never."""
    what, target = TARGETS[task]
    values, times = seeds.means(what), seeds.means("time")
    for value, time in zip(values, times, strict=True):
        if value >= target if what == "accuracy" else value <= target:
            return time
    return None


def times(*documents: Document) -> Table:
    """The simulated time of a run, and that to reach the target with each setting."""
    task = documents[0].field("rows", 0, "task")
    groups = _grouped(*documents)
    methods, depths = _columns(documents[0])
    what, target = TARGETS[task]
    settings = _settings(groups)
    rows = []
    for name in methods:
        cells = [f"{groups[name, ranks, LARGE].rows[0]['makespan']:,.0f}" for ranks in depths]
        for setting in settings:
            seeds = groups.get((name, *setting))
            time = _time_to_target(seeds, task) if seeds else None
            cells.append(NONE if seeds is None else "never" if time is None else f"{time:,.0f}")
        rows.append((TITLES[name], *cells))
    goal = f"{100 * target:g} %" if what == "accuracy" else f"a loss of {target:g}"
    runs = (f"the run, {ranks} ranks" for ranks in depths)
    return Table(
        (f"{task}: time", *runs, *(f"to {goal}, {kind}, {ranks} ranks" for ranks, kind in settings)), rows
    )


def memory(document: Document) -> Table:
    """The weights that are kept between actions, with the states that move them."""
    groups = _grouped(document)
    methods, depths = _columns(document)
    rows = []
    for name in methods:
        cells = []
        for ranks in depths:
            row = groups[name, ranks, LARGE].rows[0]
            kept, held = row["kept_bytes"], row["weight_bytes"]
            most = max(one / other for one, other in zip(kept, held, strict=True))
            cells += [f"{sum(kept) / 1e3:,.0f}", f"{sum(kept) / sum(held):.2f}", f"{most:.0f}"]
        rows.append((TITLES[name], *cells))
    titles = ("kB", "copies", "most of a rank")
    task = document.field("rows", 0, "task")
    return Table((f"{task}: weights", *(f"{one}, {ranks} ranks" for ranks in depths for one in titles)), rows)


def on_ranks(*documents: Document) -> Table:
    """The losses of the engine over ranks, beside those of the executor in one process."""
    rows = []
    for one in documents:
        for row in one.each("rows"):
            method, task, ranks, apart = row.fields("method", "task", "ranks", "parameters apart")
            ways = row.fields("over ranks", "in one process")
            values = [way["losses"][-1] for way in ways] + [way["held_out"] for way in ways]
            cells = (f"{value:.6f}" for value in values)
            rows.append((f"{TITLES[method]}, {task}, {ranks} ranks", *cells, f"{apart:.1e}"))
    columns = ("last list, engine", "one process", "held out, engine", "one process", "parameters apart")
    return Table(("", *columns), rows)


# ------------------------------------------------------------------------------------------------ pictures


def draw(documents: Sequence[Document], path: Path) -> None:
    """Draw the held-out accuracy or loss over samples and over simulated time, for each depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    task = documents[0].field("rows", 0, "task")
    what, _ = TARGETS[task]
    lines = [(*key, seeds) for key, seeds in _grouped(*documents).items()]
    panels = _settings(line[:3] for line in lines)
    figure, axes = plt.subplots(
        len(panels), 2, figsize=(11, 3.6 * len(panels)), layout="constrained", squeeze=False
    )
    for (ranks, setting), pair in zip(panels, axes, strict=True):
        for axis, along in zip(pair, ("samples", "time"), strict=True):
            for name, its_ranks, its_setting, seeds in lines:
                if (its_ranks, its_setting) == (ranks, setting):
                    style = "--" if name in ("gpipe", "1f1b", "2bw", "paci") else "-"
                    xs, ys = seeds.means(along), seeds.means(what)
                    axis.plot(xs, ys, style, color=SHOWN[name][1], linewidth=1.3, label=TITLES[name])
            label = "samples" if along == "samples" else "simulated time, in forwards of one block"
            axis.set(xlabel=label, ylabel=f"held-out {what}", title=f"{ranks} ranks, {setting} rate")
            axis.grid(alpha=0.3)
            axis.set_ylim(*LIMITS[task])
            if along == "time":  # 1F1B with a flush after each micro-batch takes many times as long
                others = [
                    one.rows[0]["makespan"] for name, at, _, one in lines if at == ranks and name != "one"
                ]
                axis.set_xlim(0, 1.05 * max(others))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
