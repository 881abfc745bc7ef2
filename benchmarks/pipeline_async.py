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
import sys
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

import zeroshard
from before import run_on_ranks
from medians import Median, median_of, median_ratio
from pipeline import alternate, as_json, job_of, parser_of, report, take_turns
from pipeline_clock import against_simulator
from pipeline_engines import Setting, adamw
from zeroshard.config.pipeline import ASYNCHRONOUS
from zeroshard.parallel.pipeline.schedules import steady

FLUSHED = "1F1B, flushed"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--methods", default=",".join(ASYNCHRONOUS), help="names, perhaps with :k behind")
    parser.add_argument("--microbatches", type=int, default=32, help="of a turn")
    parser.add_argument("--size", type=int, default=1, help="sequences of a micro-batch")
    parser.set_defaults(rounds=8)
    args = parser.parse_args(arguments)
    args.batch = args.microbatches * args.size
    return args


class Trained:
    """An engine of zeroshard.

    Args:
        turn: the turn of all engines.
        schedule: the name of a schedule.
        num_microbatches: micro-batches of each of its batches.
        per_step: micro-batches of a step; None for a synchronous schedule.
    """

    def __init__(self, turn: Setting, schedule: str, num_microbatches: int, per_step: int | None) -> None:
        self._turn, self._num_batches = turn, turn.num_microbatches // num_microbatches
        pipeline: dict[str, Any] = {"schedule": schedule, "num_microbatches": num_microbatches}
        if per_step is not None:
            pipeline["microbatches_per_step"] = per_step
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


def build(turn: Setting, methods: list[str]) -> dict[str, Trained]:
    """The engine that is flushed, and that of each method, with the same first weights."""
    num_ranks = dist.get_world_size()
    if turn.num_microbatches % num_ranks:
        raise ValueError(f"expected a multiple of {num_ranks} micro-batches, got {turn.num_microbatches}")
    engines = {FLUSHED: Trained(turn, "1f1b", num_ranks, None)}
    for method in methods:
        name, _, per_step = method.partition(":")
        engines[method] = Trained(turn, name, turn.num_microbatches, int(per_step or num_ranks))
    return engines


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take turns, and return a row for each engine; collective."""
    job, num_ranks = job_of(args), dist.get_world_size()
    engines = build(Setting(job, args.microbatches), args.methods.split(","))

    ours = {key: one.engine for key, one in engines.items() if key != FLUSHED}
    found, clocks, transfer = alternate(args, job, ours, partial(take_turns, engines, job))
    times = {key: [one[key].seconds for one in found] for key in engines}
    flushed = times.pop(FLUSHED)
    rows: dict[str, Any] = {
        FLUSHED: {
            "micro-batches a step": num_ranks,
            "s a turn": median_of(flushed),
            **_steps(flushed, args, num_ranks),
        }
    }
    for key, seconds in times.items():
        per_step = engines[key].per_step
        schedule = steady(num_ranks, args.microbatches, per_step)
        rows[key] = {
            "micro-batches a step": per_step,
            "s a turn": median_of(seconds),
            **_steps(seconds, args, per_step),
            "ratio of micro-batches a second to flushed": median_ratio(flushed, seconds),
            "bound of the ratio": (2 * num_ranks - 1) / num_ranks,
            **against_simulator(schedule, clocks[key], transfer, "s a makespan"),
        }
    return as_json(rows)


def _steps(seconds: list[float], args: argparse.Namespace, per_step: int) -> dict[str, Median]:
    """The steps per second of turns."""
    num = math.ceil(args.microbatches / per_step)
    return {"steps a second": median_of([num / one for one in seconds])}


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), partial(report, kind="pipeline_async", measure=measure)))
