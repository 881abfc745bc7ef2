"""Asynchronous methods of pipelines against synchronous ones: accuracy or loss, time and weight memory.

    python benchmarks/asynchronous.py                        # all of it
    python benchmarks/asynchronous.py --quick                # a few micro-batches, to see that all of it runs
    python benchmarks/asynchronous.py --redraw asynchronous  # only draw, and print tables
    python benchmarks/asynchronous.py --tasks digits --depths 8 --methods pb,spectrain --seeds 0

Every run trains in this process, over the lists of all ranks (`asynchronous_executor.py`). All runs of a task
see as many samples. Methods that take a step after each micro-batch are compared with 1F1B that does so as
well, with a flush each time; the others with 1F1B of as many micro-batches a step.

The optimizer is SGD with momentum, for which all methods are published, at a constant learning rate. Its
hyperparameters are chosen without delays, by the mean training loss of 1F1B in the last fifth of a run, with
as many micro-batches a step and seeds of their own:

    large     momentum 0.9, and the largest rate of a grid whose loss is at most 0.05 nats above that of the
              best one: delays matter most here
    scaled    the best rate and the momentum of eight micro-batches a step, made for steps of one: m^(1/8) for
              a momentum m, and the rate at which a sample changes weights as much; at the largest depth.
              Source: Kosson et al. 2021, "Pipelined Backpropagation at Scale"
    own       momentum 0.9, and the rate with the least loss of the method itself, at the largest depth: the
              only setting that is chosen with delays, and from a longer grid

`asynchronous_ranks.py` runs two of the methods on ranks of their own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from asynchronous_executor import Executor, Shown
from asynchronous_methods import MANY, METHODS, delays_of
from asynchronous_report import LARGE, OWN, SCALED, SETTINGS, draw, memory, quality, times
from asynchronous_tasks import BLOCKS, TASKS
from documents import read

MOMENTUM = 0.9
RATES = tuple(0.008 * 2**power for power in range(6))
"""The grid of learning rates."""
OWN_RATES = tuple(0.002 * 2**power for power in range(8))
"""That of rates of a method's own: 2BW with momentum bears a far smaller one than 1F1B."""
TUNING_SEEDS = (100, 101)
GRID = "grid"
"""The setting of runs that choose a rate."""
MARGIN = 0.05
"""Nats of training loss by which a large rate may be worse than the best one."""
LOOKS = 15
"""Evaluations of a run, at equal distances."""
LAST = 0.2
"""The part of a run over which its training loss is the mean."""
REFERENCES = {1: "one", MANY: "1f1b"}
"""By micro-batches of a step, the method without delays that the learning rate is chosen with."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run."""

    task: str
    ranks: int
    method: str
    setting: str
    """LARGE, SCALED or OWN; GRID in runs that choose a rate."""
    seed: int
    lr: float
    momentum: float
    microbatches: int


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", default=",".join(TASKS), help="names, separated by commas")
    parser.add_argument("--depths", default="4,8", help="pipeline ranks; divisors of 8")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--settings", default=",".join(SETTINGS), help="of the hyperparameters")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--microbatches", type=int, default=640, help="of a run; a multiple of 8")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, each on one core")
    parser.add_argument(
        "--rates", metavar="NAME", help="take the rates of the documents of an earlier --name"
    )
    parser.add_argument("--redraw", metavar="NAMES", help="only draw the documents of earlier names")
    parser.add_argument("--quick", action="store_true", help="few micro-batches, rates and seeds")
    parser.add_argument("--name", default="asynchronous", help="the first part of the names of the files")
    args = parser.parse_args(arguments)
    for key, known in (("tasks", TASKS), ("methods", METHODS), ("settings", SETTINGS)):
        if unknown := set(getattr(args, key).split(",")) - set(known):
            parser.error(f"Expected --{key} among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if args.quick:
        args.microbatches, args.seeds = 80, args.seeds.partition(",")[0]
    if args.microbatches % 8 or args.microbatches < 40:
        parser.error(f"Expected --microbatches to be a multiple of 8 from 40, got {args.microbatches}")
    return args


@contextmanager
def on_one_core() -> Iterator[None]:
    """Compute small tensors fast: a run is one thread, and the process has its settings back after it."""
    num_threads, mkldnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # convolutions of a few kB take longer with it
    torch.set_flush_denormal(True)  # a run that diverges is full of them, and they are slow
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.backends.mkldnn.enabled = mkldnn
        torch.set_num_threads(num_threads)


@on_one_core()
def train(case: Case) -> dict[str, Any]:
    """Run a case; return a row of the document. A run ends with the first loss that is not finite."""
    task, method = TASKS[case.task], METHODS[case.method]
    delays = delays_of(case.method, case.ranks, case.microbatches)
    inputs, targets = task.microbatches(case.seed, case.microbatches)
    losses: list[float] = []
    looks: list[dict[str, float]] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = task.loss(output, target)
        if not math.isfinite(value := loss.item()):
            raise FloatingPointError(f"the loss of micro-batch {len(losses)} is {value}")
        losses.append(value)
        return loss

    def look(shown: Shown) -> None:
        loss, right = task.evaluate([stage.module for stage in executor.stages])
        if math.isfinite(loss):
            samples = min(shown.steps * method.per_step, case.microbatches) * task.rows
            time = shown.time * BLOCKS / case.ranks
            looks.append({"samples": samples, "time": time, "loss": loss, "accuracy": right})

    modules = task.modules(case.seed, case.ranks)
    num_bytes = [sum(one.nbytes for one in module.parameters()) for module in modules]
    executor = Executor(
        modules, lambda own: torch.optim.SGD(own, lr=case.lr, momentum=case.momentum), method.rule, loss_fn
    )
    steps = case.microbatches // method.per_step
    look_at = {max(1, round(steps * number / LOOKS)) for number in range(1, LOOKS + 1)}
    try:
        executor.run(delays, lambda number: (inputs[number], targets[number]), look_at, look)
        is_finite = len(looks) == len(look_at)
    except FloatingPointError:
        is_finite = False
    last = losses[-round(LAST * case.microbatches) :]
    states = [
        stage.noted is not None and crossed > 0
        for stage, crossed in zip(executor.stages, delays.crossed, strict=True)
    ]
    return {
        **asdict(case),
        "diverged_at": None if is_finite else len(losses),
        "train_loss": statistics.fmean(last) if is_finite else None,
        "looks": looks,
        "makespan": delays.timeline.makespan * BLOCKS / case.ranks,
        "weight_bytes": num_bytes,
        "kept_bytes": [
            size * (live + noted) for size, live, noted in zip(num_bytes, delays.live, states, strict=True)
        ],
    }


def run_all(cases: Sequence[Case], processes: int) -> list[dict[str, Any]]:
    """Run the cases, and tell each that ends."""
    console = record.console()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for row in pool.map(train, cases) if processes > 1 else map(train, cases):
            rows.append(row)
            last = row["looks"][-1] if row["looks"] else {}
            end = f"diverged at {row['diverged_at']}" if row["diverged_at"] is not None else str(last)
            facts = (f"{row['ranks']} ranks", *(row[key] for key in ("task", "method", "setting")))
            name = ", ".join([*facts, f"lr {row['lr']:g}", f"seed {row['seed']}"])
            console.print(f"{len(rows)}/{len(cases)} {name}: {end}", highlight=False)
    return rows


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The learning rates that were chosen without delays, by micro-batches of a step."""

    best: dict[int, float]
    large: dict[int, float]
    own: dict[str, float]
    """By method, the rates that were chosen with its own delays, if the runs need them."""
    grid: list[dict[str, Any]]
    """The runs that they were chosen with."""


def rates_of(task: str, args: argparse.Namespace) -> Rates:
    """Choose learning rates; those without delays may come from an earlier run."""
    if args.rates is None:
        rates = choose_rates(task, args)
    else:
        found = read(record.RESULTS / f"{args.rates}_{task}.json").field("rates")
        best, large = ({int(step): lr for step, lr in found[key].items()} for key in ("best", "large"))
        rates = Rates(best=best, large=large, own={}, grid=found["grid"])
    return choose_own(task, rates, args) if OWN in args.settings.split(",") else rates


def grid_runs(
    task: str, ranks: int, methods: Iterable[str], rates: Sequence[float], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The runs that a rate is chosen with, as rows of the document."""
    given = {"task": task, "ranks": ranks, "momentum": MOMENTUM, "microbatches": args.microbatches}
    cases = [
        Case(method=method, setting=GRID, seed=seed, lr=lr, **given)
        for method in methods
        for lr in (rates[1:4] if args.quick else rates)
        for seed in TUNING_SEEDS
    ]
    kept = ("method", "ranks", "lr", "seed", "train_loss", "diverged_at")
    return [{key: row[key] for key in kept} for row in run_all(cases, args.processes)]


def mean_losses(rows: Sequence[dict[str, Any]], method: str) -> dict[float, float]:
    """The mean training loss of a method by learning rate; infinite if a run diverged."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["method"] == method:
            loss = row["train_loss"]
            found.setdefault(row["lr"], []).append(math.inf if loss is None else loss)
    return {lr: statistics.fmean(losses) for lr, losses in found.items()}


def choose_rates(task: str, args: argparse.Namespace) -> Rates:
    """Choose learning rates without delays."""
    rates = Rates(best={}, large={}, own={}, grid=grid_runs(task, 1, REFERENCES.values(), RATES, args))
    for per_step, method in REFERENCES.items():
        means = mean_losses(rates.grid, method)
        least = min(means.values())
        rates.best[per_step] = min(means, key=lambda lr: means[lr])
        rates.large[per_step] = max(lr for lr, mean in means.items() if mean <= least + MARGIN)
    return rates


def choose_own(task: str, rates: Rates, args: argparse.Namespace) -> Rates:
    """Choose the learning rate of each method with its own delays, at the largest depth."""
    depth = max(map(int, args.depths.split(",")))
    rows = grid_runs(task, depth, args.methods.split(","), OWN_RATES, args)
    for method in args.methods.split(","):
        means = mean_losses(rows, method)
        rates.own[method] = min(means, key=lambda lr: means[lr])
    return replace(rates, grid=[*rates.grid, *rows])


def scaled(lr: float, momentum: float, number: int) -> tuple[float, float]:
    """Return the learning rate and the momentum for steps of a `number`-th of the samples.

    Source: Kosson et al. 2021, "Pipelined Backpropagation at Scale".
    """
    root = momentum ** (1 / number)
    return lr * (1 - root) / ((1 - momentum) * number), root


def cases_of(task: str, rates: Rates, args: argparse.Namespace) -> list[Case]:
    """The runs of a task; those of the same lists stand side by side."""
    depths = [int(depth) for depth in args.depths.split(",")]
    cases = []
    for ranks, name in itertools.product(depths, args.methods.split(",")):
        per_step = METHODS[name].per_step
        settings = {LARGE: (rates.large[per_step], MOMENTUM)}
        if ranks == max(depths):
            if name in rates.own:
                settings[OWN] = rates.own[name], MOMENTUM
            if per_step == 1:
                settings[SCALED] = scaled(rates.best[MANY], MOMENTUM, MANY)
        given = {"task": task, "ranks": ranks, "method": name, "microbatches": args.microbatches}
        cases += [
            Case(setting=setting, seed=int(seed), lr=lr, momentum=momentum, **given)
            for setting, (lr, momentum) in settings.items()
            if setting in args.settings.split(",")
            for seed in args.seeds.split(",")
        ]
    return cases


def show(paths: Sequence[Path]) -> None:
    """Draw the documents of a task beside the first one, and print the tables."""
    documents = [read(path) for path in paths]
    draw(documents, paths[0].with_suffix(".png"))
    print(quality(*documents).markdown())
    if LARGE in documents[0].field("settings", "settings"):
        print(times(*documents).markdown(), memory(documents[0]).markdown(), sep="\n")


def main() -> int:
    """Run all cases; write documents and pictures, and print the tables."""
    args = parse()
    for name in args.tasks.split(","):
        if args.redraw is not None:
            show([record.RESULTS / f"{one}_{name}.json" for one in args.redraw.split(",")])
            continue
        rates = rates_of(name, args)
        rows = run_all(cases_of(name, rates, args), args.processes)
        settings = {**vars(args), "momentum": MOMENTUM, "rows": TASKS[name].rows}
        path = record.write(f"{args.name}_{name}", rows, settings=settings, rates=asdict(rates))
        show([path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
