"""Main parameters of bfloat16 against those of float32: time of a step of two optimizers on the CPU.

    python benchmarks/main_dtype.py
    python benchmarks/main_dtype.py --elements 1000000 --rounds 5 --name quick_look

Each has an engine of its own, on one rank, and the same gradients. They take turns, in an order that is
shuffled every round. Ratios are those of steps in the same round. Before that, a check compares the first
steps in bfloat16 with those in float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import record
import zeroshard
from medians import median_of, median_ratio
from turns import check_near, command_line, in_turns

DTYPES = ("fp32", "bf16")
OPTIMIZERS = ("AdamW, fused", "AdamW8bit")
FARTHEST = 0.01
"""The largest distance between parameters of the two dtypes after the first steps, relative to their norm.
bfloat16 has 8 bits of mantissa."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, name="main_dtype_cpu", threads=2, rounds=40, warmup=2)
    parser.add_argument("--elements", type=int, default=17_000_000, help="of all parameters together")
    parser.add_argument("--parameters", type=int, default=10, help="that the elements are divided among")
    args = parser.parse_args()
    if args.warmup < 1:
        parser.error(f"Expected --warmup of at least 1 (steps are compared there), got {args.warmup}")
    return args


@dataclass
class Contender:
    """An optimizer over main parameters of a dtype, and the seconds of its steps."""

    optimizer: str
    dtype: str
    engine: Any

    def step(self) -> float:
        """Take a step; return its seconds."""
        start = time.perf_counter()
        self.engine.optimizer.step()
        return time.perf_counter() - start

    def values(self) -> Tensor:
        """The main parameters, [elements], float32."""
        return torch.cat([parameter.detach().float() for parameter in self.engine.parameters()])


def build(optimizer: str, dtype: str, args: argparse.Namespace) -> Contender:
    """An engine over parameters that are the same for all, with gradients."""
    generator = torch.Generator().manual_seed(0)
    size = args.elements // args.parameters
    model = nn.ParameterList(
        torch.randn(size, generator=generator).mul_(0.02) for _ in range(args.parameters)
    )
    engine = zeroshard.initialize(
        model, make_optimizer(optimizer, model), {"precision": {"main_dtype": dtype}}
    ).engine
    for parameter in engine.parameters():
        gradient = torch.randn(size, generator=generator).mul_(1e-3)
        parameter.grad = gradient.to(parameter.dtype)
    return Contender(optimizer, dtype, engine)


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    hyperparameters: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if name == "AdamW8bit":
        return zeroshard.optim.AdamW8bit(model.parameters(), **hyperparameters)
    return torch.optim.AdamW(model.parameters(), **hyperparameters, fused=True)


def rows_of(times: Mapping[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    """Seconds, and their ratios to the fused step in float32 and to the same optimizer's in float32."""
    return [
        {
            "optimizer": optimizer,
            "main_dtype": dtype,
            "median_s": median_of(seconds)._asdict(),
            "ratio_to_fused_fp32": median_ratio(seconds, times[OPTIMIZERS[0], "fp32"])._asdict(),
            "ratio_to_fp32": median_ratio(seconds, times[optimizer, "fp32"])._asdict(),
            "seconds": [round(value, 6) for value in seconds],
        }
        for (optimizer, dtype), seconds in times.items()
    ]


def main() -> int:
    """Time the steps and write them."""
    args = parse()
    torch.set_num_threads(args.threads)
    contenders = [build(name, dtype, args) for name in OPTIMIZERS for dtype in DTYPES]
    for contender in contenders:
        for _ in range(args.warmup):
            contender.step()
    for wide, narrow in zip(contenders[::2], contenders[1::2], strict=True):
        check_near(f"bfloat16 of {narrow.optimizer}", narrow.values(), wide.values(), FARTHEST)
    sides = {(one.optimizer, one.dtype): one.step for one in contenders}
    rows = rows_of(in_turns(sides, args.rounds))
    capability = torch.backends.cpu.get_cpu_capability()
    record.report("main_dtype", args.name, rows, settings=vars(args), cpu_capability=capability)
    return 0


if __name__ == "__main__":
    sys.exit(main())
