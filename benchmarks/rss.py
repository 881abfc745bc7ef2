"""Peak resident memory of a rank: one engine per run, in fresh processes, the smallest of three runs.

    python benchmarks/rss.py --ranks 2 --batch 1

It counts all memory of a rank's process: parameters, gradients, states, activations, communication buffers,
and hundreds of MB of libraries. So only differences mean something.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import record
from engines import ENGINES, LABELS, Setting, select
from launch import end_rank, inside_rank, process_group, run_ranks
from model import add_shape_arguments, build_tokens, shape_from
from turns import command_line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, ranks=2, batch=1, steps=5, runs=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)}; default all")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)  # where a run leaves its result
    add_shape_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        select(args.engines, args.precision)
    except ValueError as error:
        parser.error(str(error))
    return args


def train(args: argparse.Namespace) -> None:
    """Train one engine for a few steps; rank 0 writes the peak of the largest rank."""
    with process_group("cpu") as device:
        setting = Setting(shape=shape_from(args), batch=args.batch, precision=args.precision, device=device)
        step = ENGINES[args.engines](setting)
        tokens = build_tokens(setting.shape, args.batch, dist.get_rank(), device)
        for _ in range(args.steps):
            step(tokens)
        peak = torch.tensor(record.status_bytes("VmHWM") / 1e6)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            args.output.write_text(json.dumps(peak.item()))


def run_engine(name: str, args: argparse.Namespace, output: Path) -> float:
    """Peak RSS, in MB, of one run in fresh processes.

    Raises:
        RuntimeError: the run failed.
    """
    arguments = [*sys.argv[1:], "--engines", name, "--output", str(output)]  # the last of a flag counts
    status = run_ranks(__file__, arguments, args.ranks)
    if status != 0 or not output.exists():
        raise RuntimeError(f"Expected a result from {name}, got exit status {status}")
    peak: float = json.loads(output.read_text())
    output.unlink()
    return peak


def measure(args: argparse.Namespace) -> None:
    """Run every engine several times, write and print the peaks."""
    console = record.console()
    names, skipped = select(args.engines, args.precision)
    peaks: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.runs):
            for name in names:
                peaks[name].append(run_engine(name, args, Path(folder) / "peak.json"))
                console.print(f"{name}: {peaks[name][-1]:.0f} MB")
    rows = [{"engine": n, "label": LABELS[n], "peak_rss_mb": min(p), "runs_mb": p} for n, p in peaks.items()]
    settings = {key: value for key, value in vars(args).items() if key != "output"}
    name = args.name or f"rss_{args.ranks}ranks_{args.precision}_batch{args.batch}"
    record.report("rss", name, rows, settings=settings, skipped=skipped)


def main() -> int:
    """Run all engines, or be a rank of one run."""
    args = parse()
    if inside_rank():
        train(args)
        end_rank()
    measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
