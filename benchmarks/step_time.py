"""Time of a training step: zeroshard's stages against plain PyTorch, DDP, FSDP2 and DeepSpeed.

    python benchmarks/step_time.py --ranks 2 --batch 1 --precision fp32

All engines live in one process per rank and take turns step by step, in an order that is shuffled every
round. So drift of the machine and the remains of a neighbour hit all of them alike. A barrier precedes each
turn; a step takes as long as its slowest rank. Ratios of steps of the same round are compared. `--lead-in 1`
puts an untimed step of the same engine before each timed one. Stages 1 and 2 start to gather parameters after
the optimizer step: then the engine's own next step pays for that, as in training. With 0 this work may run
during the barrier or another engine's turn.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import record
from before import run_on_ranks
from engines import ENGINES, LABELS, Setting, Step, parse_with_engines, select
from launch import rank_device
from medians import median_of, median_ratio
from model import build_tokens, shape_from
from turns import command_line, in_turns, seconds_of

LOSS_TOLERANCE = {"fp32": 3e-3, "bf16": 1e-2}

Times = Mapping[str, Sequence[float]]
"""Seconds of each round, by engine."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, ranks=2, batch=1, rounds=30, warmup=3, lead_in=0, threads=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--before", metavar="COMMIT", help="also time zeroshard as that commit has it")
    args = parse_with_engines(parser, arguments)
    if args.warmup < 1:
        parser.error(f"Expected --warmup of at least 1 (losses are compared there), got {args.warmup}")
    return args


def timed_turn(step: Step, tokens: Tensor, lead_in: int) -> tuple[float, float]:
    """Barrier, untimed steps, one timed step; return its seconds and this rank's loss."""
    losses: list[Tensor] = []
    dist.barrier()
    for _ in range(lead_in):
        seconds_of(partial(step, tokens))  # to the end of its work
    seconds = seconds_of(lambda: losses.append(step(tokens)))
    return seconds, losses[0].item()


def slowest_rank(seconds: Times) -> dict[str, list[float]]:
    """Return the time of each round, which is that of its slowest rank."""
    table = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(seconds, table.tolist(), strict=True))


def mean_losses(losses: Mapping[str, float]) -> dict[str, float]:
    """The mean over the ranks."""
    values = torch.tensor(list(losses.values()), dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(losses, (values / dist.get_world_size()).tolist(), strict=True))


def check_losses(losses: Mapping[str, float], tolerance: float, num_ranks: int) -> None:
    """Compare losses after warm-up, which are about the same: nobody is timed on wrong work.

    The engines without communication are left out if each rank trains on other tokens.

    Raises:
        RuntimeError: two losses differ by more than `tolerance`, relative; the message has all of them.
    """
    compared = {n: v for n, v in losses.items() if num_ranks == 1 or not n.startswith("plain")}
    if not compared:
        return
    low, high = min(compared.values()), max(compared.values())
    if not high - low <= tolerance * abs(low):
        listing = ", ".join(f"{name} {value:.5f}" for name, value in compared.items())
        raise RuntimeError(f"Expected equal losses within {tolerance:g} after warm-up, got {listing}")


def compare(
    steps: Mapping[str, Step], tokens: Tensor, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Warm up, compare the losses, and take turns; collective.

    Returns:
        Seconds of each round by engine, those of the slowest rank, and the mean losses after warm-up.
    """
    losses: dict[str, float] = {}

    def turn(name: str) -> float:
        seconds, losses[name] = timed_turn(steps[name], tokens, args.lead_in)
        return seconds

    sides = {name: partial(turn, name) for name in steps}
    in_turns(sides, args.warmup)
    warm = mean_losses(losses)
    check_losses(warm, LOSS_TOLERANCE[args.precision], dist.get_world_size())
    gc.collect()
    gc.freeze()  # so that no engine pays for walking the objects of the others
    seconds = in_turns(sides, args.rounds)
    gc.unfreeze()
    return slowest_rank(seconds), warm


def build_engines(names: Sequence[str], setting: Setting, console: Console) -> dict[str, Step]:
    """Build the engines one after the other, on all ranks."""
    steps = {}
    for name in names:
        start = time.perf_counter()
        steps[name] = ENGINES[name](setting)
        console.print(f"built {name} in {time.perf_counter() - start:.1f} s")
    return steps


def ratio_rows(times: Times) -> list[dict[str, float | str]]:
    """Median paired ratio of each zeroshard stage to each peer."""
    rows: list[dict[str, float | str]] = []
    for engine in (name for name in times if name.startswith("zeroshard")):
        for peer in (name for name in times if not name.startswith("zeroshard")):
            ratio = median_ratio(times[engine], times[peer])
            rows.append({"engine": engine, "peer": peer, **ratio._asdict()})
    return rows


def time_rows(times: Times, losses: Mapping[str, float]) -> list[dict[str, object]]:
    """Median seconds of each engine, and all of them."""
    return [
        {
            "engine": name,
            "label": LABELS[name],
            "median_s": median_of(values)._asdict(),
            "loss_after_warmup": losses[name],
            "seconds": [round(value, 6) for value in values],
        }
        for name, values in times.items()
    ]


def measure(args: argparse.Namespace) -> None:
    """Build, warm up, check, time and report; runs on every rank."""
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), rank_device(args.device)
    console = record.console(quiet=rank != 0)
    names, skipped = select(args.engines, args.precision)
    for name, reason in skipped.items():
        console.print(f"without {name}: {reason}")
    setting = Setting(shape=shape_from(args), batch=args.batch, precision=args.precision, device=device)
    steps = build_engines(names, setting, console)
    tokens = build_tokens(setting.shape, args.batch, rank, device)
    times, losses = compare(steps, tokens, args)
    if rank == 0:
        name = args.name or f"step_time_{device.type}_{num_ranks}ranks_{args.precision}_batch{args.batch}"
        rows = {"times": time_rows(times, losses), "ratios": ratio_rows(times)}
        record.report("step_time", name, rows, settings=vars(args), skipped=skipped)


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
