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
import gc
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import record
from engines import Setting, Step
from launch import end_rank, inside_rank, process_group, run_ranks
from medians import median_of, median_ratio
from model import add_shape_arguments, build_tokens, shape_from
from offload_engines import BASE, ENGINES, TIERS
from step_time import Times, check_losses, mean_losses, run_rounds, slowest_rank

LOSS_TOLERANCE = 2e-2
"""Of the losses after warm-up; 8-bit states and bf16 main parameters differ in the third digit."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each engine")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before the timed ones")
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)}; default all")
    parser.add_argument("--folder", type=Path, help="for the files; default the system's temporary one")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--name", help="of the JSON file in benchmarks/results")
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


def measure(args: argparse.Namespace, device: torch.device, folder: Path) -> None:
    """Build, warm up, check, time, record and report; runs on every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    console = record.console(quiet=rank != 0)
    setting = Setting(shape=shape_from(args), batch=args.batch, precision=args.precision, device=device)
    tokens = build_tokens(setting.shape, args.batch, rank, device)
    skipped: dict[str, str] = {}
    built = build(names_of(args), setting, folder, skipped)
    for name, reason in skipped.items():
        console.print(f"without {name}: {reason}")
    steps = {name: step for name, (step, _) in built.items()}

    _, losses = run_rounds(steps, tokens, args.warmup, lead_in=0, seed=0)
    losses = mean_losses(losses)
    check_losses(losses, LOSS_TOLERANCE, num_ranks)
    gc.collect()
    gc.freeze()  # so that no engine pays for walking the objects of the others
    seconds, _ = run_rounds(steps, tokens, args.rounds, lead_in=0, seed=1)
    gc.unfreeze()
    times = slowest_rank(seconds)
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
    dist.barrier()


def main() -> int:
    """Start the ranks, or be one."""
    args = parse()
    if inside_rank():
        with process_group(args.device, args.threads) as device:
            measure(args, device, args.folder)
        end_rank()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return run_ranks(__file__, [*sys.argv[1:], "--folder", folder], args.ranks)


if __name__ == "__main__":
    sys.exit(main())
