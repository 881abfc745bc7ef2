"""Step time over pipeline ranks: zeroshard against the schedules of torch by hand, and against predictions.

    python benchmarks/pipeline.py --ranks 2                  # a Llama, real compute: 0.13 s a micro-batch
    python benchmarks/pipeline.py --ranks 4 --sleep 10       # blocks that sleep, on any number of cores

torch's `torch.distributed.pipelining` gets the same chunks, cut by hand in two ways. In "torch model" the
other layers are taken out of the Llama, and its own forward runs, as in ours. In "torch layers" a module of a
few lines calls the layers one after the other, without the masks and outputs of transformers. All engines are
in one process per rank and take turns, in a new order each round. A time is that of a whole step, from a
barrier up to the next one; a ratio is the median of those of the same round. "Own work" is the time of the
rank's thread on a core in a step, of the rank that has more of it: waits are not in it, nor other processes.
All engines must have the same losses.

The makespan of an engine of ours is the time from the first action of any rank to the last one. Our simulator
predicts it from durations that were noted in other rounds, between those that count. They are, for each
chunk, the median of its forwards and that of its backwards or of their halves, without the waits for
messages. The duration of a message is half of a round trip between two ranks that do nothing else.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import record
from before import run_on_ranks
from medians import Median, median_of, median_ratio
from pipeline_clock import Clock, against_simulator, measure_transfer
from pipeline_engines import TORCHS, Ours, Setting, Torchs
from pipeline_jobs import VOCABULARY, Job, Llama, Sleepers
from turns import command_line

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "varuna")
WARM_UP = 2
"""Rounds before all others: shapes and messages are new."""


def parser_of(what: str) -> argparse.ArgumentParser:
    """The command line of benchmarks of pipelines, without what is said of the schedules."""
    sizes = {"width": 512, "blocks": 8, "length": 128, "vocabulary": VOCABULARY}
    parser = command_line(what, ranks=2, rounds=20, **sizes)
    parser.add_argument("--sleep", type=float, metavar="MS", help="blocks sleep; a Llama otherwise")
    parser.add_argument("--noted", type=int, default=2, help="durations are noted before each so many rounds")
    return parser


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names, separated by commas")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a batch")
    return parser.parse_args(arguments)


def job_of(args: argparse.Namespace) -> Job:
    """The model and its batches."""
    if args.sleep is not None:
        return Sleepers(args.sleep / 1e3, args.blocks, args.batch)
    return Llama(args.width, args.blocks, args.batch, args.length, args.vocabulary)


Engines = dict[tuple[str, str], Ours | Torchs]
"""By whose they are and by schedule."""
Times = dict[tuple[str, str], list[float]]
MEASURED = ("seconds", "work")
"""Of a turn."""


class Turn(NamedTuple):
    """A step of an engine, or several."""

    seconds: float
    work: float
    """Seconds of this rank's thread on a core."""
    loss: Tensor | None


def build(setting: Setting, names: list[str]) -> Engines:
    """All engines, with the same weights."""
    engines: Engines = {("zeroshard", name): Ours(setting, name) for name in names}
    for name in names:
        if name in TORCHS:
            engines |= {(f"torch {cut}", name): Torchs(setting, name, cut) for cut in setting.job.cuts}
    return engines


def take_turns(engines: Mapping[Any, Any], job: Job, number: int) -> dict[Any, Turn]:
    """Let each engine have its turn in a round."""
    inputs, targets = job.batch(number)
    turns = {}
    for key in random.Random(number).sample(list(engines), len(engines)):
        dist.barrier()
        start, before = time.perf_counter(), time.thread_time()
        loss = engines[key].turn(inputs, targets)
        work = time.thread_time() - before
        dist.barrier()
        turns[key] = Turn(time.perf_counter() - start, work, loss)
    return turns


class Noted(NamedTuple):
    """The rounds of all engines."""

    turns: list[dict[Any, Turn]]
    clocks: dict[str, Clock]
    """The durations of actions that were noted, by the name of the engine."""
    transfer: float
    """Seconds of a message."""


def alternate(
    args: argparse.Namespace, job: Job, ours: Mapping[str, Any], turn: Callable[[int], dict[Any, Turn]]
) -> Noted:
    """Take turns, and note durations in rounds between: load of other processes comes into both alike.

    Args:
        ours: engines of zeroshard, whose durations are noted.
        turn: takes a round of all engines, so that they keep the same weights.
    """
    for number in range(WARM_UP):
        turn(number)
    clocks, found = {name: Clock(engine) for name, engine in ours.items()}, []
    transfer = measure_transfer(job.message_bytes(args.microbatches))
    for number in range(args.rounds):
        if number % args.noted == 0:
            with ExitStack() as stack:
                for clock in clocks.values():
                    stack.enter_context(clock.noting())
                turn(number)
        found.append(turn(number))
    return Noted(found, clocks, transfer)


def _compared_turns(engines: Engines, job: Job, number: int) -> dict[Any, Turn]:
    """Take turns, and compare the losses; collective, as torch has them on the rank of the last chunk alone.

    Raises:
        RuntimeError: the losses differ.
    """
    turns = take_turns(engines, job, number)
    losses = {key: turn.loss for key, turn in turns.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    own = {key: loss.item() for key, loss in losses.items() if loss is not None}
    dist.all_gather_object(everyone, own)
    found = {key: loss for one in everyone for key, loss in one.items()}
    low, high = min(found.values()), max(found.values())
    if len(found) != len(losses) or high - low > 1e-3 * abs(low):
        raise RuntimeError(
            f"expected the same losses of {len(losses)} engines, got {found} in round {number}"
        )
    return turns


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take turns, and return a row for each schedule; collective."""
    job = job_of(args)
    setting, names = Setting(job, args.microbatches), args.schedules.split(",")
    engines = build(setting, names)

    ours = {key[1]: one.engine for key, one in engines.items() if isinstance(one, Ours)}
    turns, clocks, transfer = alternate(args, job, ours, partial(_compared_turns, engines, job))
    steps, work = ({key: [getattr(one[key], what) for one in turns] for key in engines} for what in MEASURED)
    work = _of_busiest(work)
    return as_json(
        {
            name: _compared(steps, name, "a step")
            | _compared(work, name, "of own work")
            | against_simulator(setting.schedule(name), clocks[name], transfer, "zeroshard, s a makespan")
            for name in names
        }
    )


def as_json(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The rows with medians as objects."""
    return {
        name: {what: one._asdict() if isinstance(one, Median) else one for what, one in row.items()}
        for name, row in rows.items()
    }


def _of_busiest(work: Times) -> Times:
    """The work of the rank that has most of it, by round; collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, work)
    return {key: list(map(max, *(one[key] for one in everyone))) for key in work}


def _compared(times: Times, name: str, what: str) -> dict[str, Any]:
    """The times of the engines with a schedule."""
    own = {whose: values for (whose, schedule), values in times.items() if schedule == name}
    row: dict[str, Any] = {f"{whose}, s {what}": median_of(values) for whose, values in own.items()}
    for whose, values in own.items():
        if whose != "zeroshard":
            row[f"ratio zeroshard/{whose}, {what}"] = median_ratio(own["zeroshard"], values)
    return row


def report(
    args: argparse.Namespace,
    kind: str = "pipeline",
    measure: Callable[[argparse.Namespace], dict[str, Any]] = measure,
) -> None:
    """Measure; print and write the rows on rank 0."""
    rows = measure(args)
    if dist.get_rank():
        return
    model = "llama" if args.sleep is None else "sleep"
    settings = {**vars(args), "threads": torch.get_num_threads()}
    name = args.name or f"{kind}_{args.ranks}ranks_{model}"
    record.report(kind, name, rows, settings=settings)


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), report))
