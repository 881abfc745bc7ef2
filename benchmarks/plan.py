"""Step times of many configurations on two CPU ranks: measured, and as the planner predicts them.

    python benchmarks/plan.py                  # 18 configurations of a Llama, about 6 minutes on 2 cores

Engines of all configurations are in one process per rank and take turns, in a new order each round; a time is
that of a whole step, from a barrier up to the next one. The planner sees none of these times: before the
engines of each round it times the units of the model and small exchanges, so that the load of other
processes comes into both alike. Each engine takes a step that is not timed before the step that is. Medians
over all rounds go into the prediction, and are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import kendalltau

import record
import zeroshard
from before import run_on_ranks
from model import build_llama
from turns import command_line
from zeroshard.comm.lifecycle import start_world
from zeroshard.memory.activations import loss_of_tokens
from zeroshard.planning.profile import Subject
from zeroshard.planning.search import Ranks
from zeroshard.planning.timeline import Choice

HEAD = 64
SAMPLES = 8
"""Of a step, of both ranks together."""
CHOICES = (
    Choice(stage=0, samples=4),
    Choice(stage=1, samples=4),
    Choice(stage=2, samples=4),
    Choice(stage=3, samples=4),
    Choice(stage=3, samples=4, recompute="unit"),
    Choice(stage=0, samples=1),
    Choice(stage=2, samples=1),
    Choice(stage=3, samples=1),
    Choice(stage=3, samples=2),
    Choice(stage=1, samples=2, recompute="unit"),
    Choice(stage=0, samples=8, tp=2),
    Choice(stage=3, samples=2, tp=2),
    Choice(stage=0, samples=4, tp=2, recompute="unit"),
    Choice(stage=0, samples=1, pp=2, schedule="1f1b"),
    Choice(stage=0, samples=2, pp=2, schedule="gpipe"),
    Choice(stage=0, samples=1, pp=2, schedule="interleaved", chunks=2),
    Choice(stage=0, samples=2, pp=2, schedule="zb-h1"),
    Choice(stage=0, samples=2, pp=2, schedule="1f1b", recompute="unit"),
)


def parse() -> argparse.Namespace:
    """The command line."""
    sizes = {"width": 384, "blocks": 6, "vocabulary": 4096, "length": 128}
    return command_line(__doc__, name="plan_2ranks", ranks=2, rounds=12, **sizes).parse_args()


def build(args: argparse.Namespace) -> Any:
    """The same weights for all engines."""
    return build_llama(args.width, args.blocks, head=HEAD, vocabulary=args.vocabulary, length=args.length)


def engine_of(args: argparse.Namespace, config: dict[str, Any]) -> Callable[[], Any]:
    """A function that takes a step."""
    engine = zeroshard.initialize(
        build(args), lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True), config
    ).engine
    num = SAMPLES if engine.config.mesh.pp * engine.config.mesh.tp > 1 else SAMPLES // args.ranks
    generator = torch.Generator().manual_seed(dist.get_rank() if num < SAMPLES else 0)
    tokens = torch.randint(args.vocabulary, (num, args.length), generator=generator)
    return lambda: engine.train_batch({"input_ids": tokens}, tokens)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take turns; return a row for each configuration, and the summary; collective."""
    world = start_world(torch.device("cpu"), 600.0)
    subject = Subject(build(args), lambda num: loss_of_tokens((num, args.length)))
    planner = Ranks(world, subject, SAMPLES, (1, 2))
    planner.measure((1,))  # the cut of a pipeline needs it
    configs = planner.predictor().config
    steps = {str(choice): engine_of(args, configs(choice)) for choice in CHOICES}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-1, args.rounds):  # the first round is no measurement
        planner.measure((1, 2, 4, 8))
        for name in random.Random(number).sample(list(steps), len(steps)):
            steps[name]()  # it brings back what other engines have put out of the caches
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            seconds[name] += [time.perf_counter() - start] if number >= 0 else []
    predict = planner.predictor()
    rows = {}
    for choice in CHOICES:
        measured, found = statistics.median(seconds[str(choice)]), predict(choice)
        rows[str(choice)] = {
            "measured, s": measured,
            "predicted, s": found.seconds,
            "error": found.seconds / measured - 1,
            "busy": found.busy,
        }
    times, guesses = ([row[key] for row in rows.values()] for key in ("measured, s", "predicted, s"))
    errors = [abs(row["error"]) for row in rows.values()]
    summary = {
        "median error": statistics.median(errors),
        "worst error": max(errors),
        "Kendall's tau": kendalltau(times, guesses).statistic,
        "chosen / best": times[guesses.index(min(guesses))] / min(times),
    }
    return {"rows": rows, "summary": summary, "cluster": asdict(planner.cluster())}


def report(args: argparse.Namespace) -> None:
    """Measure; print and write on rank 0."""
    found = measure(args)
    if dist.get_rank():
        return
    for name, row in found["rows"].items():
        print(f"{name:<60} {row['measured, s']:.3f} {row['predicted, s']:.3f} {row['error']:+.1%}")
    print(found["summary"])
    rows = found.pop("rows")
    path = record.write(args.name, rows, settings=vars(args), **found)
    print(f"wrote {path.name}")


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), report))
