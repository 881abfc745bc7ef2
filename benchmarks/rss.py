"""Peak resident memory of a rank: one engine per run, in fresh processes, the smallest of three runs.

    python benchmarks/rss.py --ranks 2 --batch 1

It counts all memory of a rank's process: parameters, gradients, states, activations, communication buffers,
and hundreds of MB of libraries. So only differences mean something.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

import record
from engines import ENGINES, LABELS, Setting, parse_with_engines, select
from launch import end_rank, give_result, inside_rank, process_group, result_of_ranks
from model import build_tokens, shape_from
from turns import command_line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    return parse_with_engines(command_line(__doc__, ranks=2, batch=1, steps=5, runs=3), arguments)


def train(args: argparse.Namespace) -> None:
    """Train one engine for a few steps; give the peak of the largest rank, in MB."""
    with process_group("cpu") as device:
        setting = Setting(shape=shape_from(args), batch=args.batch, precision=args.precision, device=device)
        step = ENGINES[args.engines](setting)
        tokens = build_tokens(setting.shape, args.batch, dist.get_rank(), device)
        for _ in range(args.steps):
            step(tokens)
        peak = torch.tensor(record.status_bytes("VmHWM") / 1e6)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        give_result(peak.item())
    end_rank()


def measure(args: argparse.Namespace) -> None:
    """Run every engine several times, write and print the peaks."""
    console = record.console()
    names, skipped = select(args.engines, args.precision)
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.runs):
        for name in names:
            arguments = [*sys.argv[1:], "--engines", name]  # the last of a flag counts
            peaks[name].append(result_of_ranks(__file__, arguments, args.ranks))
            console.print(f"{name}: {peaks[name][-1]:.0f} MB")
    rows = [{"engine": n, "label": LABELS[n], "peak_rss_mb": min(p), "runs_mb": p} for n, p in peaks.items()]
    name = args.name or f"rss_{args.ranks}ranks_{args.precision}_batch{args.batch}"
    record.report("rss", name, rows, settings=vars(args), skipped=skipped)


if __name__ == "__main__":
    (train if inside_rank() else measure)(parse())
