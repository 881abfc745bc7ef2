"""The time that hooks take on the host: 200 tiny blocks, each a unit, against the package of another commit.

    python benchmarks/hooks.py --before COMMIT --ranks 2 --stage 2

A turn is a forward and a backward under no_sync(), so nothing is exchanged at stages 0 to 2. Blocks compute
next to nothing. Both engines are in one process and take turns; a ratio is that of two turns side by side.
Time is that of the thread on a core: other processes on the machine count little.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import record
from before import load, run_on_cpu
from medians import median_of, median_ratio

WIDTH = 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="COMMIT", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--param-dtype", default=None, help="for example bfloat16")
    parser.add_argument("--name", help="of the JSON file in benchmarks/results")
    return parser.parse_args()


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Sequential]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(package: Any, args: argparse.Namespace) -> Any:
    """An engine of `package` over blocks of two layers."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(args.blocks)]
    config = {"stage": args.stage, "units": ["Sequential"], "precision": {"param_dtype": args.param_dtype}}
    model = Stack(blocks)
    return package.initialize(model, lambda parameters: torch.optim.SGD(parameters, lr=1e-3), config).engine


def turn(engine: Any, x: torch.Tensor) -> float:
    """Seconds of a forward and a backward on a core; the gradients are dropped afterwards."""
    start = time.thread_time()
    with engine.no_sync():
        engine.backward(engine(x).float().square().mean())
    seconds = time.thread_time() - start
    engine.zero_grad()
    return seconds


def measure(args: argparse.Namespace) -> None:
    engines = {"now": build(importlib.import_module("zeroshard"), args), "before": build(load(), args)}
    x = torch.randn(2, WIDTH)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(args.rounds + 5):
        for name in sorted(engines, reverse=bool(number % 2)):
            dist.barrier()
            seconds = turn(engines[name], x)
            if number >= 5:
                times[name].append(seconds)
    if dist.get_rank() == 0:
        ratio = median_ratio(times["now"], times["before"])
        rows = {
            "ratio now/before": ratio._asdict(),
            **{
                f"{name}, us a unit": median_of(each).value / args.blocks * 1e6
                for name, each in times.items()
            },
        }
        for what, value in rows.items():
            record.console().print(what, value)
        record.write(args.name or f"hooks_{args.ranks}ranks_stage{args.stage}", rows, settings=vars(args))


if __name__ == "__main__":
    sys.exit(run_on_cpu(__file__, parse(), measure))
