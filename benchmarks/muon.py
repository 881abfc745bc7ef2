"""Step time of Muon: ranks share the matrices, against every rank computing all of them.

    python benchmarks/muon.py --ranks 2

All sides are in one process per rank and take turns, in a new order each round. A time is that of the
optimizer's step alone, from a barrier up to the next one; a ratio is the median of those of the same round.
"All" is `zeroshard.optim.Muon` over whole parameters on each rank, as in DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import record
import zeroshard
from before import run_on_cpu
from medians import median_of, median_ratio

WARM_UP = 2


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", default="0,3", help="separated by commas")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--name", help="of the JSON file in benchmarks/results")
    parser.set_defaults(before=None)
    return parser.parse_args(arguments)


class Block(nn.Module):
    """The matrices of a Llama's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width * 11 // 4
        self.attention = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.attention:
            x = x + linear(x)
        y: Tensor = self.down(torch.tanh(self.up(x)) * self.gate(x))
        return x + y


class Side:
    """A model and its optimizer.

    Args:
        args: the command line.
        stage: of the engine; None for a model that is whole on each rank.
    """

    def __init__(self, args: argparse.Namespace, stage: int | None) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Block(args.width) for _ in range(args.blocks)))
        self.optimizer: Any = zeroshard.optim.Muon(zeroshard.optim.muon_groups(model), lr=1e-3)
        self.engine = None
        if stage is not None:
            config = {"stage": stage, "units": ["Block"]}
            self.engine = zeroshard.initialize(model, self.optimizer, config).engine
        self.model = self.engine or model

    def turn(self, inputs: Tensor) -> float:
        """Compute gradients; return the seconds of a step."""
        loss = self.model(inputs).square().mean()
        if self.engine is None:
            loss.backward()
        else:
            self.engine.backward(loss)
        dist.barrier()
        start = time.perf_counter()
        if self.engine is None:
            self.optimizer.step()
        else:
            self.engine.step()
        dist.barrier()
        seconds = time.perf_counter() - start
        self.optimizer.zero_grad()
        return seconds


def report(args: argparse.Namespace) -> None:
    """Take turns; print and write the rows on rank 0."""
    stages = [int(stage) for stage in args.stages.split(",")]
    sides = {"all": Side(args, None)} | {f"stage {stage}": Side(args, stage) for stage in stages}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(WARM_UP + args.rounds):
        inputs = torch.randn(8, args.width, generator=torch.Generator().manual_seed(number))
        for name in random.Random(number).sample(list(sides), len(sides)):
            seconds = sides[name].turn(inputs)
            if number >= WARM_UP:
                times[name].append(seconds)
    if dist.get_rank():
        return
    rows = {
        name: {
            "s a step": median_of(own)._asdict(),
            "ratio to all": median_ratio(own, times["all"])._asdict(),
        }
        for name, own in times.items()
    }
    record.console().print(rows)
    settings = {**vars(args), "threads": torch.get_num_threads()}
    record.write(args.name or f"muon_{args.ranks}ranks", rows, settings=settings)


if __name__ == "__main__":
    sys.exit(run_on_cpu(__file__, parse(), report))
