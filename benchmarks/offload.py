"""Offload: step time and bytes on each tier of each setting, against no offload and DeepSpeed.

    python benchmarks/offload.py --folder /mnt/nvme
    python benchmarks/offload.py --device cuda --precision bf16 --ranks 1 --dim 2048 --depth 16 --heads 16

All engines live in one process per rank and take turns step by step, in an order that is shuffled every
round. Ratios of steps of the same round are compared. On CPU ranks host memory is the device, so "cpu" and
"cpu-parameters" keep everything where it was. An engine with files sets glibc's allocator for its whole
process, so the one without offload has that setting too.

DeepSpeed builds its CPU Adam and its file access at the first start, which takes minutes; the latter needs
the headers of libaio. "deepspeed-nvme" has optimizer states in files, "deepspeed-nvme-parameters" all. Other
peers are in `offload_gpu.py`, as they need a GPU.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import record
from before import run_on_ranks
from engines import Setting, Step
from launch import common_folder, rank_device
from medians import median_of, median_ratio
from model import add_shape_arguments, build_tokens, shape_from
from offload_engines import BASE, ENGINES, TIERS
from step_time import Times, compare
from turns import command_line

LOSS_TOLERANCE = 2e-2
"""Of the losses after warm-up; 8-bit states and bf16 main parameters differ in the third digit."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, ranks=2, batch=1, rounds=15, warmup=3, threads=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)}; default all")
    parser.add_argument("--folder", type=Path, help="for the files; default the system's temporary one")
    add_shape_arguments(parser)
    args = parser.parse_args()
    unknown = set(names_of(args)) - set(ENGINES)
    if unknown or BASE not in names_of(args):
        parser.error(f"Expected {BASE} and others of {', '.join(ENGINES)}, got {args.engines}")
    return args


def names_of(args: argparse.Namespace) -> list[str]:
    """The engines that were asked for."""
    return list(ENGINES) if args.engines is None else args.engines.split(",")


def bytes_of(engine: Any) -> dict[str, int]:
    """Bytes of a rank on each tier, between steps and as counted at the peak of gathered parameters."""
    report = engine.memory_report()
    return {
        "device": report.total,
        "gathered_at_peak": report.peak_unsharded,
        "host": report.host,
        "nvme": report.nvme,
    }


def build(
    names: Sequence[str], setting: Setting, folder: Path, skipped: dict[str, str]
) -> dict[str, tuple[Step, Any]]:
    """Build the engines; a peer that cannot be built here is added to `skipped` with its error."""
    built = {}
    for name in names:
        try:
            built[name] = ENGINES[name](setting, folder)
        except Exception as error:  # a compiler or a library is missing
            if name in TIERS:
                raise
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            traceback.print_exc()  # of the whole error; files of results have no paths
    return built


def ratios_to_peers(name: str, times: Times) -> dict[str, dict[str, float]]:
    """Median paired ratios of an engine of zeroshard to the other libraries of the run."""
    peers = [peer for peer in times if peer not in TIERS] if name in TIERS else []
    return {peer: median_ratio(times[name], times[peer])._asdict() for peer in peers}


def measure(args: argparse.Namespace) -> None:
    """Build, warm up, check, time, record and report; runs on every rank."""
    with common_folder(args.folder) as folder:
        measure_in(folder, args)


def measure_in(folder: Path, args: argparse.Namespace) -> None:
    """Measure with files in a folder."""
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), rank_device(args.device)
    console = record.console(quiet=rank != 0)
    setting = Setting(shape=shape_from(args), batch=args.batch, precision=args.precision, device=device)
    tokens = build_tokens(setting.shape, args.batch, rank, device)
    skipped: dict[str, str] = {}
    built = build(names_of(args), setting, folder, skipped)
    for name, reason in skipped.items():
        console.print(f"without {name}: {reason}")
    steps = {name: step for name, (step, _) in built.items()}
    times, losses = compare(steps, tokens, args, LOSS_TOLERANCE)
    if rank == 0:
        rows = [
            {
                "engine": name,
                "median_s": median_of(times[name])._asdict(),
                "ratio": median_ratio(times[name], times[BASE])._asdict(),
                "ratio_to_peers": ratios_to_peers(name, times),
                "loss_after_warmup": losses[name],
                "bytes": bytes_of(engine) if engine is not None else None,
                "seconds": [round(value, 6) for value in times[name]],
            }
            for name, (_, engine) in built.items()
        ]
        num_params = sum(p.numel() for p in setting.model().parameters())
        stem = args.name or f"offload_{device.type}_{num_ranks}ranks_{args.precision}"
        settings = {key: value for key, value in vars(args).items() if key != "folder"}
        extra = {"skipped": skipped, "num_params": num_params}
        record.report("offload", stem, rows, settings=settings, **extra)


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
