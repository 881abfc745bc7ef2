"""The time that a unit of 9 parameters takes on the host beyond plain PyTorch: zeroshard against FSDP2.

    python benchmarks/unit_cost.py --ranks 2 --before COMMIT

60 tiny blocks, each a unit, compute next to nothing. A turn is a whole step: forward, backward, optimizer,
zero_grad. `--passes 1` times its forward and backward alone; with `--bf16 1` units compute in bfloat16 over
main parameters of float32. All engines are in one process per rank and take turns. The cost of an engine is
the median of the differences to plain PyTorch in the same round, over the number of blocks. One rank counts
the time of the thread on a core; several count wall time from a barrier on, with the exchanges.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import record
from before import load, run_on_ranks
from medians import median_of, median_ratio
from turns import command_line, in_turns

WIDTH = 8


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, ranks=1, stage=3, blocks=60, rounds=40, passes=0, bf16=0)
    parser.add_argument("--before", metavar="COMMIT", help="also time zeroshard as that commit has it")
    return parser.parse_args()


class Block(nn.Module):
    """Nine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def build_model(num_blocks: int) -> nn.Sequential:
    """The same weights for all engines."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_blocks)])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all engines."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def sharded(package: Any, args: argparse.Namespace) -> tuple[Callable[[Tensor], Tensor], Any]:
    """An engine of `package`, and its optimizer."""
    config = {"stage": args.stage, "units": ["Block"]}
    if args.bf16:
        config["precision"] = {"param_dtype": "bfloat16"}
    engine, optimizer, *_ = package.initialize(build_model(args.blocks), adamw, config)
    return engine, optimizer


def fsdp2(args: argparse.Namespace) -> tuple[Callable[[Tensor], Tensor], Any]:
    """torch's fully_shard of every block and of the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), build_model(args.blocks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.bf16 else None)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, adamw(model.parameters())


def timed_step(
    args: argparse.Namespace, model: Callable[[Tensor], Tensor], optimizer: Any, x: Tensor
) -> float:
    """Take a whole step, and return the seconds of it or of its passes."""
    clock = time.thread_time if args.ranks == 1 else time.perf_counter
    dist.barrier()
    start = clock()
    model(x).square().mean().backward()
    passed = clock()
    optimizer.step()
    optimizer.zero_grad()
    return (passed if args.passes else clock()) - start


def measure(args: argparse.Namespace) -> None:
    """Take turns, and write the costs."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    plain = build_model(args.blocks).to(dtype)
    engines = {
        "plain": (plain, adamw(plain.parameters())),
        "zeroshard": sharded(importlib.import_module("zeroshard"), args),
        "fsdp2": fsdp2(args),
    }
    if args.before:
        engines["before"] = sharded(load(), args)
    x = torch.randn(2, WIDTH, dtype=dtype)
    turns = {name: partial(timed_step, args, *engine, x) for name, engine in engines.items()}
    times = in_turns(turns, args.rounds, warmup=5)
    if dist.get_rank():
        return
    plain_s = times.pop("plain")
    costs = {
        name: [(a - b) / args.blocks * 1e6 for a, b in zip(own, plain_s, strict=True)]
        for name, own in times.items()
    }
    rows = {f"{name}, us a unit beyond plain": median_of(cost)._asdict() for name, cost in costs.items()}
    ours = costs.pop("zeroshard")
    rows |= {f"ratio zeroshard/{name}": median_ratio(ours, cost)._asdict() for name, cost in costs.items()}
    part = f"stage{args.stage}" + "_passes" * args.passes + "_bf16" * args.bf16
    name = args.name or f"unit_cost_{args.ranks}ranks_{part}"
    record.report("unit_cost", name, rows, settings=vars(args))


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
