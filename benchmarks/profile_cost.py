"""Step time inside `zeroshard.profile`, against the same engine without it.

    python benchmarks/profile_cost.py --ranks 2

One engine of a small Llama takes turns of a few steps each, inside a profile and without one. A ratio is that
of the two turns of a round. "Without memory" takes no samples of memory. The parts of each profile are added
up and compared with the time around its steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import record
import zeroshard
from before import run_on_cpu
from medians import median_of, median_ratio
from pipeline_jobs import Llama

STEPS = 4


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--name", help="of the JSON file in benchmarks/results")
    parser.set_defaults(before=None)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    """Take turns, and write the ratios."""
    job = Llama(args.width, args.blocks, 4, args.length)
    config = {"stage": args.stage}
    engine = zeroshard.initialize(job.model(), lambda p: torch.optim.AdamW(p, lr=1e-4), config).engine
    batches = [job.batch(number) for number in range(STEPS)]
    ways: dict[str, Callable[[], Any]] = {
        "off": nullcontext,
        "on": lambda: zeroshard.profile(engine),
        "without memory": lambda: zeroshard.profile(engine, memory=False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    shares: list[float] = []
    for number in range(args.rounds + 2):
        for name in random.Random(number).sample(list(ways), len(ways)):
            with ways[name]() as profile:
                dist.barrier()
                start = time.perf_counter()
                for inputs, targets in batches:
                    engine.backward(job.loss(engine(input_ids=inputs), targets))
                    engine.step()
                seconds = time.perf_counter() - start
            if number >= 2:
                times[name].append(seconds / STEPS)
            if number >= 2 and profile is not None:
                shares.append(sum(profile.phases.values()) * profile.num_steps / seconds)
    if dist.get_rank():
        return
    rows = {f"{name}, s a step": median_of(own)._asdict() for name, own in times.items()}
    for name in ("on", "without memory"):
        rows[f"ratio {name}/off"] = median_ratio(times[name], times["off"])._asdict()
    rows["ratio sum of the parts/time of the steps"] = median_of(shares)._asdict()
    name = args.name or f"profile_cost_{args.ranks}ranks_stage{args.stage}"
    record.report("profile_cost", name, rows, settings=vars(args))


if __name__ == "__main__":
    sys.exit(run_on_cpu(__file__, parse(), measure))
