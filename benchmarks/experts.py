"""Tokens a second of a Switch transformer, beside plain transformers: experts by "eager" and "grouped_mm".

    python benchmarks/experts.py --ranks 2 --note "other jobs were running"

Plain transformers is Mixtral with one expert for each token, without capacity, trained by PyTorch (under
DistributedDataParallel with several ranks). The same Switch model is trained by PyTorch, and by zeroshard at
stages 0 and 3. Rounds of all alternate; a row has the median round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
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

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import switch

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
BATCH = 8, 128
KINDS = ("plain transformers", "plain, Switch", "zeroshard, stage 0", "zeroshard, stage 3")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--note", default="", help="what else the machine did, for the JSON")
    parser.add_argument("--name", default=None, help="of the JSON file; None: experts_RANKS")
    return parser.parse_args(arguments)


def trainer(kind: str, experts: str) -> Callable[[int], None]:
    """Return a function that takes one step."""
    model: Any = switch.build(experts, **SIZES)
    if kind == "plain transformers":
        model = MixtralForCausalLM(model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind.startswith("zeroshard"):
        engine = zeroshard.initialize(model, optimizer, {"stage": int(kind[-1])}).engine

        def step(number: int) -> None:
            tokens = switch.batch(number, engine.dp_rank, 512, *BATCH)
            engine.backward(engine(tokens, labels=tokens).loss)
            engine.step()

        return step
    if dist.get_world_size() > 1:  # an expert that no token of a rank chose has no gradient there
        model = DistributedDataParallel(model, find_unused_parameters=True)

    def plain(number: int) -> None:
        tokens = switch.batch(number, dist.get_rank(), 512, *BATCH)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return plain


def measure(args: argparse.Namespace) -> None:
    steps = {(kind, experts): trainer(kind, experts) for experts in ("eager", "grouped_mm") for kind in KINDS}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for number in range(args.rounds + 1):
        for key, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step(number)
            seconds[key].append(time.perf_counter() - begin)
    tokens = BATCH[0] * BATCH[1] * dist.get_world_size()
    rows = [
        {"trained by": kind, "experts": experts, "tokens/s": round(tokens / median(times[1:]))}
        for (kind, experts), times in seconds.items()
    ]
    if dist.get_rank() == 0:
        settings = {**vars(args), **SIZES, "experts": 8, "batch of a rank": BATCH}
        path = record.write(args.name or f"experts_{args.ranks}", rows, settings=settings, note=args.note)
        for row in rows:
            print(" | ".join(map(str, row.values())))
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
