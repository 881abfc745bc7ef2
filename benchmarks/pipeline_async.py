"""Steps per second of asynchronous pipelines: against 1F1B that is flushed, and against predictions.

    python benchmarks/pipeline_async.py --ranks 2                # a Llama, real compute
    python benchmarks/pipeline_async.py --ranks 4 --sleep 10     # blocks that sleep, on any number of cores

"1F1B, flushed" takes a step after each m = p micro-batches, and is empty then. So each of its steps takes the
time of m + p - 1 micro-batches, where one that is never flushed takes that of m. The asynchronous methods
run a list of many micro-batches, filled once and drained once, with a step after k of them: "pb:1" is the
method "pb" with k = 1, and "pb" alone has k = p.

All engines are in one process per rank and take turns, in a new order each round. In a turn each of them
trains the same number of micro-batches of the same size. A time is that of the whole turn, from a barrier up
to the next one; a ratio is the median of those of the same round. With k = p the steps of a turn are as many
as those of the flushed engine, so the ratio of the times is that of the steps per second. The bound of the
ratio is (m + p - 1) / m; a list of M micro-batches can come to M / (M + p - 1) of it, since it fills and
drains, and steps take time that no schedule saves.

The makespan of a list is the time from the first action of any rank to the last one. Our simulator predicts
it from durations that were noted in other rounds, between those that count: the medians of the forwards, of
the backwards and of the steps of each rank, without the waits for messages. `ActionCosts.step` is one number;
the largest of the ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import record
import zeroshard
from before import run_on_cpu
from medians import Median, median_of, median_ratio
from pipeline import job_of
from pipeline_clock import Clock, makespans, measure_transfer, predict
from pipeline_engines import adamw
from pipeline_jobs import VOCABULARY, Job
from zeroshard.config.pipeline import ASYNCHRONOUS
from zeroshard.parallel.pipeline.schedules import steady

FLUSHED = "1F1B, flushed"
WARM_UP = 2
"""Turns before all others: shapes and messages are new."""

Times = dict[str, list[float]]
"""By engine."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--methods", default=",".join(ASYNCHRONOUS), help="names, perhaps with :k behind")
    parser.add_argument("--microbatches", type=int, default=32, help="of a turn")
    parser.add_argument("--sleep", type=float, metavar="MS", help="blocks sleep; a Llama otherwise")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--size", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="of the Llama")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--noted", type=int, default=2, help="durations are noted before each so many rounds")
    parser.add_argument("--name", help="of the JSON file in benchmarks/results")
    parser.set_defaults(before=None)
    args = parser.parse_args(arguments)
    args.batch = args.microbatches * args.size
    return args


class Turn(NamedTuple):
    """The micro-batches of a turn of all engines."""

    job: Job
    num_microbatches: int


class Trained:
    """An engine of zeroshard.

    Args:
        turn: the turn of all engines.
        schedule: the name of a schedule.
        num_microbatches: micro-batches of each of its batches.
        per_step: micro-batches of a step; None for a synchronous schedule.
    """

    def __init__(self, turn: Turn, schedule: str, num_microbatches: int, per_step: int | None) -> None:
        self._turn, self._num_batches = turn, turn.num_microbatches // num_microbatches
        pipeline: dict[str, Any] = {"schedule": schedule, "num_microbatches": num_microbatches}
        if per_step is not None:
            pipeline["microbatches_per_step"] = per_step
        # The cut must not depend on a measurement, as it would with balance "time": all have the same.
        pipeline["balance"] = "memory"
        config = {"stage": 0, "mesh": {"pp": dist.get_world_size()}, "pipeline": pipeline}
        self.per_step = per_step or num_microbatches
        self.engine = zeroshard.initialize(turn.job.model(), adamw, config, loss_fn=turn.job.loss).engine

    def turn(self, inputs: Tensor, targets: Tensor) -> None:
        """Train all micro-batches of a turn.

        Raises:
            RuntimeError: a loss is not finite.
        """
        num, named = self._num_batches, self._turn.job.named
        for piece, target in zip(inputs.chunk(num), targets.chunk(num), strict=True):
            loss = self.engine.train_batch(named(piece), target)
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"expected finite losses, got {loss.item()}")


def build(turn: Turn, methods: list[str]) -> dict[str, Trained]:
    """The engine that is flushed, and that of each method, with the same first weights."""
    num_ranks = dist.get_world_size()
    if turn.num_microbatches % num_ranks:
        raise ValueError(f"expected a multiple of {num_ranks} micro-batches, got {turn.num_microbatches}")
    engines = {FLUSHED: Trained(turn, "1f1b", num_ranks, None)}
    for method in methods:
        name, _, per_step = method.partition(":")
        engines[method] = Trained(turn, name, turn.num_microbatches, int(per_step or num_ranks))
    return engines


def take_turns(engines: dict[str, Trained], job: Job, number: int) -> dict[str, float]:
    """Take a turn of each engine; return its seconds."""
    inputs, targets = job.batch(number)
    seconds = {}
    for key in random.Random(number).sample(list(engines), len(engines)):
        dist.barrier()
        start = time.perf_counter()
        engines[key].turn(inputs, targets)
        dist.barrier()
        seconds[key] = time.perf_counter() - start
    return seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take turns, and return a row for each engine; collective."""
    job, num_ranks = job_of(args), dist.get_world_size()
    engines = build(Turn(job, args.microbatches), args.methods.split(","))
    for number in range(WARM_UP):
        take_turns(engines, job, number)
    clocks = {key: Clock(one.engine) for key, one in engines.items() if key != FLUSHED}
    transfer = measure_transfer(job.message_bytes(args.microbatches))
    times = _alternate(args, engines, clocks, job)
    flushed = times.pop(FLUSHED)
    rows: dict[str, Any] = {
        FLUSHED: {
            "micro-batches a step": num_ranks,
            "s a turn": median_of(flushed),
            **_steps(flushed, args, num_ranks),
        }
    }
    for key, seconds in times.items():
        per_step, measured = engines[key].per_step, makespans(clocks[key])
        predicted, costs = predict(steady(num_ranks, args.microbatches, per_step), clocks[key], transfer)
        rows[key] = {
            "micro-batches a step": per_step,
            "s a turn": median_of(seconds),
            **_steps(seconds, args, per_step),
            "ratio of micro-batches a second to flushed": median_ratio(flushed, seconds),
            "bound of the ratio": (2 * num_ranks - 1) / num_ranks,
            "s a makespan": median_of(measured),
            "predicted, s a makespan": predicted,
            "ratio predicted/measured": median_ratio([predicted] * len(measured), measured),
            "costs, s": vars(costs),
        }
    return {
        key: {what: one._asdict() if isinstance(one, Median) else one for what, one in row.items()}
        for key, row in rows.items()
    }


def _steps(seconds: list[float], args: argparse.Namespace, per_step: int) -> dict[str, Median]:
    """The steps per second of turns."""
    num = math.ceil(args.microbatches / per_step)
    return {"steps a second": median_of([num / one for one in seconds])}


def _alternate(
    args: argparse.Namespace, engines: dict[str, Trained], clocks: dict[str, Clock], job: Job
) -> Times:
    """Take turns, and note durations in rounds between: load of other processes comes into both alike."""
    found = []
    for number in range(args.rounds):
        if number % args.noted == 0:
            with ExitStack() as stack:
                for clock in clocks.values():
                    stack.enter_context(clock.noting())
                take_turns({key: engines[key] for key in clocks}, job, number)
        found.append(take_turns(engines, job, number))
    return {key: [one[key] for one in found] for key in engines}


def report(args: argparse.Namespace) -> None:
    """Measure; print and write the rows on rank 0."""
    load_before = os.getloadavg()
    rows = measure(args)
    if dist.get_rank():
        return
    model = "llama" if args.sleep is None else "sleep"
    load = {"before": load_before, "after": os.getloadavg()}
    settings = {**vars(args), "threads": torch.get_num_threads()}
    name = args.name or f"pipeline_async_{args.ranks}ranks_{model}"
    record.report("pipeline_async", name, rows, settings=settings, load_average=load)


if __name__ == "__main__":
    sys.exit(run_on_cpu(__file__, parse(), report))
