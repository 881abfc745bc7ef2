"""Growth of a rank's peak resident memory while a checkpoint is loaded and sharded.

    python benchmarks/load_rss.py --ranks 8

It writes a Llama with random weights in fp32 to a temporary folder, and loads it at stage 3 with
`zeroshard.from_pretrained` and `initialize`; and, to compare, builds it under `deferred_init`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import record
import zeroshard
from launch import end_rank, inside_rank, process_group, run_ranks

WAYS = ("from_pretrained", "deferred_init")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the checkpoint, for a rank
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def shape(args: argparse.Namespace, *, layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=args.vocabulary,
    )


def status_bytes(key: str) -> int:
    """VmRSS (resident now) or VmHWM (at the peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"Expected a line {key} in /proc/self/status, got none: this benchmark needs Linux")


def load(args: argparse.Namespace) -> None:
    """Load on this rank; rank 0 writes the growth of the largest rank."""
    with process_group("cpu"):
        with zeroshard.deferred_init():
            warm_up = LlamaForCausalLM(shape(args, layers=1))
        zeroshard.initialize(warm_up, None, {"stage": 3})
        if args.way == "from_pretrained":
            zeroshard.from_pretrained(LlamaForCausalLM, args.folder)
        del warm_up
        dist.barrier()
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        if args.way == "from_pretrained":
            model = zeroshard.from_pretrained(LlamaForCausalLM, args.folder, {"stage": 3})
        else:
            with zeroshard.deferred_init():
                model = LlamaForCausalLM(shape(args, layers=args.layers))
        sizes = [4 * parameter.numel() for parameter in model.parameters()]
        engine = zeroshard.initialize(model, None, {"stage": 3}).engine
        growth = torch.tensor(status_bytes("VmHWM") - before)
        dist.all_reduce(growth, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            row = {
                "way": args.way,
                "growth_mb": growth.item() / 1e6,
                "model_mb": sum(sizes) / 1e6,
                "shard_mb": sum(sizes) / 1e6 / args.ranks,
                "largest_parameter_mb": max(sizes) / 1e6,
                "largest_unit_mb": 4 * max(unit.numel for unit in engine.units) / 1e6,
            }
            (args.folder / "row.json").write_text(json.dumps(row))


def main() -> int:
    """Write the checkpoint and measure, or be a rank."""
    args = parse()
    if inside_rank():
        load(args)
        end_rank()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(shape(args, layers=args.layers)).save_pretrained(folder)
        for way in WAYS:
            status = run_ranks(__file__, [*sys.argv[1:], "--folder", folder, "--way", way], args.ranks)
            if status != 0:
                raise RuntimeError(f"Expected a result from {way}, got exit status {status}")
            rows.append(json.loads((Path(folder) / "row.json").read_text()))
    table = Table(*rows[0], title=f"peak RSS growth of a rank, {args.ranks} ranks, stage 3, fp32")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.1f}" for value in row.values()))
    console = record.console()
    console.print(table)
    settings = {key: value for key, value in vars(args).items() if key not in ("folder", "way")}
    path = record.write(f"load_rss_{args.ranks}ranks", rows, settings=settings)
    console.print(f"wrote {path.relative_to(record.RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
