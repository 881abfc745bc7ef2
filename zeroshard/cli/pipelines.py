"""`zeroshard plan`: schedules of a pipeline, simulated, compared and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import NamedTuple

from zeroshard.cli.options import PlanOptions
from zeroshard.config.pipeline import ASYNCHRONOUS, Pipeline
from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule, parse_schedule
from zeroshard.parallel.pipeline.asynchronous.ages import Ages
from zeroshard.parallel.pipeline.asynchronous.uses import WEIGHTS, count_live
from zeroshard.parallel.pipeline.schedules import SCHEDULES, build_schedule, steady
from zeroshard.parallel.pipeline.simulate import ActionCosts, ScheduleTimes, count_activations, simulate
from zeroshard.tables import LINE, render

_MAX_ACTIONS = 1 << 18  # chunks times micro-batches; 512 times 512 take half a minute
_NOTE = (
    "Activations: the most micro-batches whose activations a rank holds at a time; one chunk of several\n"
    "counts as its part of the rank."
)


WIDTH = 100
"""The most characters of a line, as in tables, where the terminal is not wider."""


class Chart(NamedTuple):
    """A schedule with its name and its times."""

    name: str
    schedule: Schedule
    timeline: ScheduleTimes
    weights: str = "stash"
    """The weights of its actions, by their name in the config; a list of the user's keeps versions."""


def plan(options: PlanOptions) -> None:
    """Run `zeroshard plan`."""
    if options.list and len(options.schedule) > 1:
        raise ValueError(f"--list: expected one --schedule, got {len(options.schedule)}")
    charts = []
    for name in options.schedule:
        schedule = _schedule(name, options)
        chunks = schedule.num_chunks / schedule.num_ranks
        weights = ASYNCHRONOUS[name].weights if name in ASYNCHRONOUS else "stash"
        timeline = simulate(schedule, _costs(options, chunks))
        charts.append(Chart(_title(name, schedule), schedule, timeline, weights))
    if options.list:
        print(charts[0].schedule, end="")
        return
    print(_about(options), "", _table(charts), "", _NOTE, sep="\n")
    for chart in charts if options.plot else ():
        print("", draw_text(chart, max(WIDTH, get_terminal_size().columns)), sep="\n")


def _schedule(name: str, options: PlanOptions) -> Schedule:
    if name in SCHEDULES or name in ASYNCHRONOUS:
        return _built(name, options)
    if not Path(name).is_file():
        known = ", ".join((*SCHEDULES, *ASYNCHRONOUS))
        raise ValueError(f"--schedule: expected one of {known}, or a file with lists, got {name!r}")
    try:
        schedule = parse_schedule(Path(name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    found = {"--stages": schedule.num_ranks, "--microbatches": schedule.num_microbatches}
    for option, given in (("--stages", options.stages), ("--microbatches", options.microbatches)):
        if given is not None and given != found[option]:
            raise ValueError(f"{name}: expected {option} {found[option]}, as in the lists, got {given}")
    return schedule


def _built(name: str, options: PlanOptions) -> Schedule:
    stages, microbatches = options.stages, options.microbatches
    if stages is None or microbatches is None:
        raise ValueError(f"--schedule {name} needs --stages and --microbatches")
    builder = SCHEDULES.get(name, SCHEDULES["1f1b"])
    # Among several schedules, a schedule with a fixed number of chunks keeps it.
    is_fixed = builder.max_chunks is not None and len(options.schedule) > 1
    chunks = None if is_fixed else options.chunks
    if (size := stages * microbatches * (chunks or builder.min_chunks)) > _MAX_ACTIONS:
        raise ValueError(
            f"expected at most {_MAX_ACTIONS:,} chunks times micro-batches, got {size:,} for {name}"
        )
    recompute = options.recompute is not None
    if name in SCHEDULES:
        costs = _costs(options, 1)
        return build_schedule(name, stages, microbatches, chunks, recompute=recompute, costs=costs)
    if recompute:
        raise ValueError(f"--recompute: expected synchronous schedules, got {name}")
    per_step = Pipeline(schedule=name).step_size(stages) if options.per_step is None else options.per_step
    numbers = {"--stages": stages, "--microbatches": microbatches, "--per-step": per_step}
    for option, number in numbers.items():
        if number < 1:
            raise ValueError(f"{option}: expected at least 1, got {number}")
    return steady(stages, microbatches, per_step)


def _costs(options: PlanOptions, chunks_per_rank: float) -> ActionCosts:
    """Return the costs of a chunk, of which a rank has several; the options have the costs of a rank."""
    half = options.backward / 2 / chunks_per_rank
    recompute = options.forward if options.recompute is None else options.recompute
    return ActionCosts(
        forward=options.forward / chunks_per_rank,
        backward_input=half,
        backward_weight=half,
        recompute=recompute / chunks_per_rank,
        transfer=options.transfer,
    )


def _title(name: str, schedule: Schedule) -> str:
    title = name if name in SCHEDULES or name in ASYNCHRONOUS else Path(name).name
    chunks = schedule.num_chunks // schedule.num_ranks
    return title if chunks == 1 else f"{title}, {chunks} chunks"


def _about(options: PlanOptions) -> str:
    costs = f"forward {options.forward:g}, backward {options.backward:g}"
    if options.recompute is not None:
        costs += f", recompute {options.recompute:g}"
    return f"{costs} for a micro-batch on a rank; transfer {options.transfer:g}"


def _table(charts: Sequence[Chart]) -> str:
    """Return the figures of the schedules side by side."""
    held = [count_activations(chart.schedule) for chart in charts]
    rows: list[tuple[str, ...]] = [
        ("pipeline ranks", *(str(chart.schedule.num_ranks) for chart in charts)),
        ("micro-batches", *(str(chart.schedule.num_microbatches) for chart in charts)),
        ("makespan", *(f"{chart.timeline.makespan:g}" for chart in charts)),
        ("bubble share", *(f"{chart.timeline.bubble_share:.1%}" for chart in charts)),
        LINE,
    ]
    rows += _by_rank("activations", _of_ranks(charts, [each.per_rank for each in held]))
    if any(action.kind is Kind.RECOMPUTE for chart in charts for _, action in chart.schedule):
        inputs = _of_ranks(charts, [each.inputs_per_rank for each in held])
        rows += [LINE, *_by_rank("inputs for recompute", inputs)]
    ages = [Ages(chart.schedule) for chart in charts]
    if any(taken for own in ages for taken in own.before.values()):  # a chunk computes after its step
        rows += [LINE, ("steps", *(str(max(1, _num_steps(chart.schedule))) for chart in charts))]
        rows += _by_rank("delay in steps", [_delays(own) for own in ages])
        pairs = zip(ages, charts, strict=True)
        versions = [count_live(own, WEIGHTS[chart.weights](own)) for own, chart in pairs]
        rows += [LINE, *_by_rank("versions of weights", versions)]
    return render("", ("", *(chart.name for chart in charts)), rows)


def _num_steps(schedule: Schedule) -> int:
    """The steps of the last chunk; 0 in a synchronous list, whose batch ends with one."""
    last = schedule.num_chunks - 1
    return sum(action.is_step_of(last) for action in schedule.lists[schedule.placement[last]])


def _delays(ages: Ages) -> tuple[int, ...]:
    """The most steps of each pipeline rank from a forward to the step that applies its gradient."""
    return tuple(max(map(ages.tau_forward, chunks)) for chunks in ages.schedule.chunks)


def _of_ranks(charts: Sequence[Chart], counts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
    """Return counts of micro-batches of chunks as micro-batches of all layers of a rank."""
    return [
        tuple(number / len(chunks) for number, chunks in zip(own, chart.schedule.chunks, strict=True))
        for chart, own in zip(charts, counts, strict=True)
    ]


def _by_rank(noun: str, counts: Sequence[tuple[float, ...]]) -> list[tuple[str, ...]]:
    """Return a row for each pipeline rank."""
    return [
        (f"{noun}, rank {rank}", *(f"{own[rank]:g}" if rank < len(own) else "" for own in counts))
        for rank in range(max(map(len, counts)))
    ]


def draw_text(chart: Chart, width: int = WIDTH) -> str:
    """Return a line for each pipeline rank, in which time runs to the right.

        rank 0  F0─F1─······B0────B1────    a letter for the kind of action, the micro-batch, its duration;
        rank 1  ···F0─B0────F1─B1────···    points while a rank waits

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
