"""Main parameters of bfloat16 against those of float32: time of a step of two optimizers on the CPU.

    python benchmarks/main_dtype.py
    python benchmarks/main_dtype.py --elements 1000000 --rounds 5 --name quick_look

Each has an engine of its own, on one rank, and the same gradients. They take turns, in an order that is
shuffled every round. Ratios are those of steps in the same round. Before that, a check compares the first
steps in bfloat16 with those in float32.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import record
import zeroshard
from medians import median_of, median_ratio

DTYPES = ("fp32", "bf16")
OPTIMIZERS = ("AdamW, fused", "AdamW8bit")
FARTHEST = 0.01
"""The largest distance between parameters of the two dtypes after the first steps, relative to their norm.
bfloat16 has 8 bits of mantissa."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=int, default=17_000_000, help="of all parameters together")
    parser.add_argument("--parameters", type=int, default=10, help="that the elements are divided among")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40, help="timed turns of each")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before the timed ones")
    parser.add_argument("--name", default="main_dtype_cpu", help="of the JSON file in benchmarks/results")
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
    seconds: list[float] = field(default_factory=list)

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


def check_first_steps(narrow: Contender, wide: Contender) -> None:
    """Compare the first steps, so that nobody is timed on wrong work.

    Raises:
        RuntimeError: the first steps lead elsewhere than those in float32.
    """
    want = wide.values()
    distance = ((narrow.values() - want).norm() / want.norm()).item()
    if not distance <= FARTHEST:
        raise RuntimeError(
            f"Expected parameters of {narrow.optimizer} in bfloat16 within {FARTHEST} of those in float32, "
            f"got {distance:.4f}"
        )


def run_rounds(contenders: list[Contender], num_rounds: int) -> None:
    """Let each have its turn in each round."""
    shuffle = random.Random(0).shuffle
    for _ in range(num_rounds):
        order = list(contenders)
        shuffle(order)
        for contender in order:
            contender.seconds.append(contender.step())


def rows_of(contenders: list[Contender]) -> list[dict[str, Any]]:
    """Seconds, and their ratios to the fused step in float32 and to the same optimizer's in float32."""
    wide = {contender.optimizer: contender.seconds for contender in contenders if contender.dtype == "fp32"}
    fused = wide[OPTIMIZERS[0]]
    return [
        {
            "optimizer": contender.optimizer,
            "main_dtype": contender.dtype,
            "median_s": median_of(contender.seconds)._asdict(),
            "ratio_to_fused_fp32": median_ratio(contender.seconds, fused)._asdict(),
            "ratio_to_fp32": median_ratio(contender.seconds, wide[contender.optimizer])._asdict(),
            "seconds": [round(value, 6) for value in contender.seconds],
        }
        for contender in contenders
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
        check_first_steps(narrow, wide)
    run_rounds(contenders, args.rounds)
    rows = rows_of(contenders)
    capability = torch.backends.cpu.get_cpu_capability()
    record.report("main_dtype", args.name, rows, settings=vars(args), cpu_capability=capability)
    return 0


if __name__ == "__main__":
    sys.exit(main())
