"""Offload and recomputation together against each alone, at equal budget, by the planner; and its errors.

    python benchmarks/budget.py              # plans of a chain of equal units, by the simulator
    python benchmarks/budget.py --measure    # trains on this machine, 3 minutes on a CPU: predicted seconds

A unit of the chain has the shape of a block of Llama 2 of 7 B: its forward takes 5.5 ms for 8,192 tokens, its
backward twice as long. Its backward needs 1.1 GB, its input takes 67 MB, and the link copies 50 GB/s each
way. These are round numbers of one H100, not measurements of a run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import record
import zeroshard
from zeroshard.forwards.budget import PLANNED
from zeroshard.forwards.keeping import (
    KEEP,
    OFFLOAD,
    OFFLOAD_INPUT,
    RECOMPUTE,
    Link,
    UnitCosts,
    UnitProfile,
    choose_keeping,
)

UNITS, SECONDS, SAVED, INPUT, RATE = 32, 5.5e-3, 1_100_000_000, 67_000_000, 50e9
WAYS = {
    "recompute": {KEEP, RECOMPUTE},
    "offload": {KEEP, OFFLOAD},
    "together": {KEEP, RECOMPUTE, OFFLOAD, OFFLOAD_INPUT},
}
SHARES = (0.9, 0.7, 0.5, 0.35, 0.2, 0.1)
"""Of what all units keep together."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="train, and compare predicted seconds")
    parser.add_argument("--compile", action="store_true", help="compile the blocks that are trained")
    parser.add_argument("--width", type=int, default=256, help="of the blocks that are trained")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--classes", type=int, default=4096, help="of the head")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--name", help="of the JSON file in benchmarks/results")
    return parser.parse_args()


def plans() -> list[dict[str, Any]]:
    """A row for each budget: the time of each way over that of keeping all; None where it does not fit."""
    link, rows = Link(to_host=RATE, from_host=RATE), []
    times = {"forward": SECONDS, "backward": 2 * SECONDS, "again": SECONDS}
    unit = UnitProfile(kept=SAVED, inputs=INPUT, moved=SAVED, **times).costs(link)
    for share in SHARES:
        budget, row = round(share * UNITS * SAVED), {"budget": share}
        for way, names in WAYS.items():
            options = tuple(option for option in unit.options if option.name in names)
            units = [UnitCosts(forward=unit.forward, backward=unit.backward, options=options)] * UNITS
            plan = choose_keeping(units, budget, link)
            fits = plan.peak <= budget
            row[way] = round(plan.seconds / (3 * SECONDS * UNITS), 4) if fits else None
        rows.append(row)
    return rows


class Block(nn.Module):
    """A gated MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return x + hidden


class Model(nn.Module):
    """Calls its blocks by itself, so that each has a choice of its own; head and loss are the root's."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.blocks))
        self.head = nn.Linear(args.width, args.classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x), targets)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each budget: predicted and measured seconds of forward and backward, and their ratio."""
    device, rows = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"), []
    if device.type == "cpu":
        torch.set_num_threads(1)
    x = torch.randn(args.tokens, args.width, device=device)
    targets = torch.randint(args.classes, (args.tokens,), device=device)
    states = 16 * sum(p.numel() for p in Model(args).parameters())
    kept = args.blocks * args.tokens * args.width * 4 * (1 + 4 * 4)
    for share in (1.2, 0.75, 0.5, 0.25):
        model = Model(args)
        config = {"stage": 0, "recompute": "auto", "memory_budget": states + round(share * kept)}
        config |= {"compile": args.compile}
        engine = zeroshard.initialize(model, torch.optim.AdamW(model.parameters(), fused=True), config).engine
        seconds, first = [], 0.0
        for _ in range(PLANNED + args.steps):
            begin = time.perf_counter()
            engine.backward(engine(x, targets))
            if device.type != "cpu":
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - begin)
            engine.step()
            first = first or sum(unit.seconds for unit in engine.units)  # before the plan has run
        units = engine.units
        predicted, found = sum(unit.seconds for unit in units), statistics.median(seconds[PLANNED:])
        root = sum(unit.seconds for unit in units if not unit.name)
        num_kept = sum(KEEP in unit.around for unit in units)
        row = {"budget": share, "kept": num_kept, "root_s": root, "first_s": first}
        row |= {"predicted_s": predicted, "measured_s": found, "error": predicted / found - 1}
        rows.append(row | {"first_error": first / found - 1})
        print(units)
        engine.close(restore=False)
    return rows


def main() -> None:
    args = parse()
    rows = measure(args) if args.measure else plans()
    for row in rows:
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    if args.name:
        record.write(args.name, rows)


if __name__ == "__main__":
    main()
