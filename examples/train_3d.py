"""Train a small language model over pipeline, data-parallel and tensor ranks at once, on CPUs.

    python examples/train_3d.py                                 # 8 ranks: pp 2 x dp 2 x tp 2
    python examples/train_3d.py --pp 4 --tp 1 --schedule zb-h1 --microbatches 8
    python examples/train_3d.py --dp 1 --tp 1 --schedule zbv    # 2 ranks

The script starts its own ranks. It trains, saves a checkpoint and takes some more steps. Then it takes the
same steps again from the checkpoint, on the same ranks without a pipeline. At the end it exports the model
for transformers. docs/pipeline_parallel.md tells more.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import zeroshard
from blocks import TextDatasets, collator
from llama import read_text, small_llama

AGAIN = 2  # steps after the checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train over pipeline, data-parallel and tensor ranks.")
    for option, default, what in (
        ("--pp", 2, "pipeline ranks, which share the blocks of the model"),
        ("--dp", 2, "data-parallel ranks, each with samples of its own"),
        ("--tp", 2, "tensor ranks, which share each layer"),
        ("--microbatches", 4, "micro-batches of a batch"),
        ("--steps", 10, "optimizer steps before the checkpoint"),
        ("--batch-size", 16, "blocks of text in a step, over all ranks"),
        ("--seq-len", 128, "bytes in a block"),
        ("--layers", 4, "blocks of the model"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{what} (%(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="a name, or a file of lists (%(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="(%(default)s)")
    parser.add_argument("--output", metavar="DIR", help="where checkpoint and model stay (nowhere)")
    args = parser.parse_args()
    divisor = args.dp * math.lcm(args.microbatches, args.pp)
    if args.batch_size % divisor:
        parser.error(
            f"--batch-size: expected a multiple of {divisor}, for {args.dp} data-parallel ranks with "
            f"{args.microbatches} micro-batches and for {args.dp * args.pp} without, got {args.batch_size}"
        )
    if "RANK" in os.environ and args.output is None:
        parser.error("--output: expected a folder with torchrun")
    return args


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of this rank's part of the model."""
    return torch.optim.AdamW(parameters, lr=3e-3)


def start(
    args: argparse.Namespace, text: TextDatasets, folder: Path | None = None, *, pp: int
) -> tuple[zeroshard.Engine, Iterator[Any]]:
    """Return an engine and its batches, as they are in the checkpoints of a folder if one is given.

    Ranks that a pipeline does not need get samples of their own. So a step has the same samples at any `pp`.
    """
    num_readers = args.dp * args.pp // pp
    pipeline = {"schedule": args.schedule, "num_microbatches": args.microbatches} if pp > 1 else {}
    config = {
        "stage": args.stage,
        "mesh": {"pp": pp, "tp": args.tp},
        "pipeline": pipeline,
        "micro_batch_size": args.batch_size // num_readers // pipeline.get("num_microbatches", 1),
        "clip_grad_norm": 1.0,
        "loader": {"drop_last": True},
    }
    model = small_llama(128, args.layers, args.seq_len)
    engine, _, loader, _ = zeroshard.initialize(
        model, make_optimizer, config, training_data=text.train, collate_fn=collator(model)
    )
    assert loader is not None  # there is training data
    if folder is not None:
        engine.load_checkpoint(folder)
    return engine, itertools.chain.from_iterable(itertools.repeat(loader))


def train(engine: zeroshard.Engine, batches: Iterator[Any], steps: range) -> None:
    """Take some steps. A batch has the samples of all micro-batches; all pipeline ranks have the same one."""
    for step in steps:
        batch = next(batches)
        loss = engine.train_batch(batch)
        say(f"step {step}: loss {loss:.4f}, gradient norm {engine.grad_norm:.4f}")


def say(line: object) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def show_ranks(engine: zeroshard.Engine) -> None:
    """Show the place of each rank in the mesh, and the bytes that it holds."""
    pp, *_, tp = engine.mesh.get_coordinate()
    held = engine.memory_report()
    own = f"{pp:3} {engine.dp_rank:3} {tp:3} {held.parameters:12,} {held.optimizer:12,}"
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    say("\nrank  pp  dp  tp   parameters       states   (bytes between steps)")
    for rank, row in enumerate(rows):
        say(f"{rank:4} {row}")


def run(args: argparse.Namespace, folder: Path) -> None:
    """Train on this rank."""
    logging.disable_progress_bar()
    text = read_text(args.seq_len)
    engine, batches = start(args, text, pp=args.pp)
    say(engine.pipeline_report() if args.pp > 1 else "one pipeline rank, which has all blocks")
    train(engine, batches, range(1, args.steps + 1))
    show_ranks(engine)
    engine.save_checkpoint(folder / "checkpoints")

    say(f"\nsteps after the checkpoint, pp {args.pp} x dp {args.dp} x tp {args.tp}")
    more = range(args.steps + 1, args.steps + AGAIN + 1)
    train(engine, batches, more)
    engine.close(restore=False)  # the other layout has the same ranks

    say(f"the same steps from the checkpoint, pp 1 x dp {args.dp * args.pp} x tp {args.tp}")
    engine, batches = start(args, text, folder / "checkpoints", pp=1)
    train(engine, batches, more)
    engine.save_pretrained(folder / "model")
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        say(f"\ntransformers reads the model: {model.num_parameters():,} parameters")


def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:
        run(args, Path(args.output))
        return
    num_ranks = math.prod((args.pp, args.dp, args.tp))
    print(f"{num_ranks} ranks: pp {args.pp} x dp {args.dp} x tp {args.tp}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", __file__, "--output", folder, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
