"""Tokens a second of a Switch transformer, beside plain transformers: experts by "eager" and "grouped_mm".

    python benchmarks/experts.py --ranks 2 --note "other jobs were running"

Plain transformers is Mixtral with one expert for each token, without capacity, trained by PyTorch (under
DistributedDataParallel with several ranks). The same Switch model is trained by PyTorch, and by zeroshard at
stages 0 and 3. Rounds of all alternate; a row has the median round.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralForCausalLM

import record
import zeroshard
from before import run_on_ranks
from launch import timed
from turns import command_line, in_turns

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import switch

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
BATCH = 8, 128
KINDS = ("plain transformers", "plain, Switch", "zeroshard, stage 0", "zeroshard, stage 3")


def parse() -> argparse.Namespace:
    parser = command_line(__doc__, ranks=1, rounds=9)
    parser.add_argument("--note", default="", help="what else the machine did, for the JSON")
    return parser.parse_args()


def trainer(kind: str, experts: str) -> Callable[[], None]:
    """Return a function that takes one step."""
    model: Any = switch.build(experts, **SIZES)
    numbers = itertools.count()
    if kind == "plain transformers":
        model = MixtralForCausalLM(model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind.startswith("zeroshard"):
        engine = zeroshard.initialize(model, optimizer, {"stage": int(kind[-1])}).engine

        def step() -> None:
            tokens = switch.batch(next(numbers), engine.dp_rank, 512, *BATCH)
            engine.backward(engine(tokens, labels=tokens).loss)
            engine.step()

        return step
    if dist.get_world_size() > 1:  # an expert that no token of a rank chose has no gradient there
        model = DistributedDataParallel(model, find_unused_parameters=True)

    def plain() -> None:
        tokens = switch.batch(next(numbers), dist.get_rank(), 512, *BATCH)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return plain


def measure(args: argparse.Namespace) -> None:
    steps = {(kind, experts): trainer(kind, experts) for experts in ("eager", "grouped_mm") for kind in KINDS}
    seconds = in_turns({key: partial(timed, step) for key, step in steps.items()}, args.rounds, warmup=1)
    tokens = BATCH[0] * BATCH[1] * dist.get_world_size()
    rows = [
        {"trained by": kind, "experts": experts, "tokens/s": round(tokens / median(times))}
        for (kind, experts), times in seconds.items()
    ]
    if dist.get_rank() == 0:
        settings = {**vars(args), **SIZES, "experts": 8, "batch of a rank": BATCH}
        name = args.name or f"experts_{args.ranks}"
        record.report("experts", name, rows, settings=settings, note=args.note)


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
