"""`zeroshard plan`: the best configurations of a model, or schedules of a pipeline, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zeroshard.cli.options import PlanOptions
from zeroshard.config.pipeline import ASYNCHRONOUS, Pipeline
from zeroshard.hf.pretrained import build_skeleton, build_typical
from zeroshard.memory.activations import loss_of_tokens
from zeroshard.parallel.pipeline.actions import Kind, Schedule, parse_schedule
from zeroshard.parallel.pipeline.asynchronous.ages import WEIGHTS, Ages, count_live
from zeroshard.parallel.pipeline.schedules import SCHEDULES, build_schedule, steady
from zeroshard.parallel.pipeline.simulate import ActionCosts, ScheduleTimes, count_activations, simulate
from zeroshard.planning.machine import read_cluster
from zeroshard.planning.predict import Predictor
from zeroshard.planning.profile import Subject
from zeroshard.planning.search import explain, search, table
from zeroshard.tables import LINE, draw, render

_MAX_ACTIONS = 1 << 18  # chunks times micro-batches; 512 times 512 take half a minute
_NOTE = (
    "Activations: the most micro-batches whose activations a rank holds at a time;\n"
    "one chunk of several counts as its part of the rank."
)


class _Result(NamedTuple):
    """A schedule with its name and its times."""

    name: str
    schedule: Schedule
    timeline: ScheduleTimes
    weights: str = "stash"
    """The weights of its actions, by their name in the config; a list of the user's keeps versions."""


def plan(options: PlanOptions) -> None:
    """Run `zeroshard plan`."""
    if options.schedule is None:
        _plan_model(options)
        return
    if options.list and len(options.schedule) > 1:
        raise ValueError(f"--list: expected one --schedule, got {len(options.schedule)}")
    results = []
    for name in options.schedule:
        schedule = _schedule(name, options)
        chunks = schedule.num_chunks / schedule.num_ranks
        weights = ASYNCHRONOUS[name].weights if name in ASYNCHRONOUS else "stash"
        timeline = simulate(schedule, _costs(options, chunks))
        results.append(_Result(_title(name, schedule), schedule, timeline, weights))
    if options.list:
        print(results[0].schedule, end="")
        return
    print(_about(options), "", _table(results, _costs(options, 1)), "", _NOTE, sep="\n")


def _plan_model(options: PlanOptions) -> None:
    given = options.model
    if given is None or options.cluster is None or options.tokens is None:
        raise ValueError("expected a MODEL with --cluster and --tokens, or --schedule")
    samples, rest = divmod(options.tokens, options.length)
    if rest or not samples:
        raise ValueError(f"--tokens: expected a multiple of --length {options.length}, got {options.tokens}")
    cluster = read_cluster(options.cluster, options.ranks)
    precision = options.precision or ("fp32" if cluster.shares_cores else "bf16")
    model = build_typical(given) if isinstance(given, int) else build_skeleton(given)
    subject = Subject(model, lambda num: loss_of_tokens((num, options.length)), {"precision": precision})
    predictor = Predictor(subject, cluster, samples)
    bits = tuple(options.optimizer_bits or (32,))
    found = search(predictor, bits=bits)
    best = found.best[0]
    config = json.dumps(predictor.config(best.choice), indent=2)
    print(table(predictor, found), "", *explain(predictor, found, bits=bits), sep="\n")
    print("", draw(best.spans()), "", config, sep="\n")
    options.out.write_text(config + "\n", encoding="utf-8")
    optimizer = "zeroshard.optim.AdamW8bit" if best.choice.bits == 8 else "torch.optim.AdamW"
    print(f"\nWrote {options.out}, a config for zeroshard.initialize with {optimizer}.")


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
    for option, found in {"stages": schedule.num_ranks, "microbatches": schedule.num_microbatches}.items():
        if (given := getattr(options, option)) not in (None, found):
            raise ValueError(f"{name}: expected --{option} {found}, as in the lists, got {given}")
    return schedule


def _built(name: str, options: PlanOptions) -> Schedule:
    stages, microbatches = options.stages, options.microbatches
    if stages is None or microbatches is None:
        raise ValueError(f"--schedule {name} needs --stages and --microbatches")
    builder = SCHEDULES.get(name, SCHEDULES["1f1b"])
    # Among several schedules, a schedule with a fixed number of chunks keeps it.
    is_fixed = builder.max_chunks is not None and len(options.schedule or ()) > 1
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
    return steady(stages, microbatches, Pipeline(schedule=name).step_size(stages))


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


def _table(results: Sequence[_Result], costs: ActionCosts) -> str:
    """Return the figures of the schedules side by side.

    Args:
        results: the schedules.
        costs: the costs of a rank, for 1F1B with steps of as many micro-batches, which drains after each.
    """
    held = [count_activations(result.schedule) for result in results]
    rows: list[tuple[str, ...]] = [
        ("pipeline ranks", *(str(result.schedule.num_ranks) for result in results)),
        ("micro-batches", *(str(result.schedule.num_microbatches) for result in results)),
        ("makespan", *(f"{result.timeline.makespan:g}" for result in results)),
        ("bubble share", *(f"{result.timeline.bubble_share:.1%}" for result in results)),
        LINE,
    ]
    rows += _by_rank("activations", _of_ranks(results, [each.per_rank for each in held]))
    if any(action.kind is Kind.RECOMPUTE for result in results for _, action in result.schedule):
        inputs = _of_ranks(results, [each.inputs_per_rank for each in held])
        rows += [LINE, *_by_rank("inputs for recompute", inputs)]
    ages = [Ages(result.schedule) for result in results]
    if any(taken for own in ages for taken in own.before.values()):  # a chunk computes after its step
        steps = [max(1, _num_steps(result.schedule)) for result in results]
        drained = (
            steady(own.num_ranks, own.num_microbatches, -(-own.num_microbatches // num), own.num_microbatches)
            for own, num in zip((result.schedule for result in results), steps, strict=True)
        )
        rows += [LINE, ("steps", *map(str, steps))]
        rows.append(("1f1b, as many steps", *(f"{simulate(one, costs).makespan:g}" for one in drained)))
        rows += _by_rank("delay in steps", [_delays(own) for own in ages])
        pairs = zip(ages, results, strict=True)
        versions = [count_live(own, WEIGHTS[result.weights](own)) for own, result in pairs]
        rows += [LINE, *_by_rank("versions of weights", versions)]
    return render("", ("", *(result.name for result in results)), rows)


def _num_steps(schedule: Schedule) -> int:
    """The steps of the last chunk; 0 in a synchronous list, whose batch ends with one."""
    last = schedule.num_chunks - 1
    return sum(action.is_step_of(last) for action in schedule.lists[schedule.placement[last]])


def _delays(ages: Ages) -> tuple[int, ...]:
    """The most steps of each pipeline rank from a forward to the step that applies its gradient."""
    return tuple(max(map(ages.tau_forward, chunks)) for chunks in ages.schedule.chunks)


def _of_ranks(results: Sequence[_Result], counts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
    """Return counts of micro-batches of chunks as micro-batches of all layers of a rank."""
    return [
        tuple(number / len(chunks) for number, chunks in zip(own, result.schedule.chunks, strict=True))
        for result, own in zip(results, counts, strict=True)
    ]


def _by_rank(noun: str, counts: Sequence[tuple[float, ...]]) -> list[tuple[str, ...]]:
    """Return a row for each pipeline rank."""
    return [
        (f"{noun}, rank {rank}", *(f"{own[rank]:g}" if rank < len(own) else "" for own in counts))
        for rank in range(max(map(len, counts)))
    ]
