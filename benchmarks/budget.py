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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

import record
import zeroshard
from turns import command_line, seconds_of
from zeroshard.forwards.budget import PLANNED, PROBED
from zeroshard.forwards.keeping import (
    KEEP,
    OFFLOAD,
    OFFLOAD_INPUT,
    RECOMPUTE,
    Link,
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
BLOCKS, WIDTH, CLASSES, TOKENS = 8, 256, 4096, 1024
"""The model that is trained, and the tokens of a step."""
KEPT = BLOCKS * TOKENS * WIDTH * 4 * (1 + 4 * 4)
"""Bytes that its blocks keep."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, steps=30)
    parser.add_argument("--measure", action="store_true", help="train, and compare predicted seconds")
    parser.add_argument("--compile", action="store_true", help="compile the blocks that are trained")
    return parser.parse_args()


def plans() -> list[dict[str, Any]]:
    """A row for each budget: the time of each way over that of keeping all; None where it does not fit."""
    link, rows = Link(to_host=RATE, from_host=RATE), []
    times = {"forward": SECONDS, "backward": 2 * SECONDS, "again": SECONDS}
    unit = UnitProfile(kept=SAVED, inputs=INPUT, moved=SAVED, **times).options(link)
    for share in SHARES:
        budget, row = round(share * UNITS * SAVED), {"budget": share}
        for way, names in WAYS.items():
            options = [option for option in unit if option.name in names]
            plan = choose_keeping([options] * UNITS, budget, link)
            row[way] = round(plan.seconds / (3 * SECONDS * UNITS), 4) if plan.peak <= budget else None
        rows.append(row)
    return rows


class Block(nn.Module):
    """A gated MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return x + hidden


def build() -> nn.Sequential:
    """Blocks with a choice each, and a head, whose time is the root's."""
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each budget: seconds of forward and backward, measured, and predicted before and after."""
    device, rows = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"), []
    torch.set_num_threads(1)
    # A model that learns its one batch by heart gets gradients below 1e-38, with which CPUs take much longer.
    optimizer = partial(torch.optim.AdamW, lr=1e-6)
    x, targets = torch.randn(TOKENS, WIDTH, device=device), torch.arange(TOKENS, device=device)
    states = 16 * sum(p.numel() for p in build().parameters())

    def backward(engine: zeroshard.Engine) -> None:
        engine.backward(cross_entropy(engine(x), targets))

    for share in (1.2, 0.75, 0.5, 0.25):
        config = {"stage": 0, "recompute": "auto", "memory_budget": states + round(share * KEPT)}
        engine = zeroshard.initialize(build(), optimizer, config | {"compile": args.compile}).engine
        seconds, predicted = [], []
        for _ in range(PLANNED + args.steps):
            seconds.append(seconds_of(partial(backward, engine)))
            engine.step()
            predicted.append(sum(unit.seconds for unit in engine.units))
        found, first = statistics.median(seconds[PLANNED:]), predicted[PROBED]  # before the plan has run
        num_kept = sum(KEEP in unit.around for unit in engine.units)
        row = {"budget": share, "kept": num_kept, "measured_s": found, "predicted_s": predicted[-1]}
        rows.append(row | {"error_of_first": first / found - 1, "error": predicted[-1] / found - 1})
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
