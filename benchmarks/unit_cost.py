"""The time that a unit of 9 parameters takes on the host beyond plain PyTorch: zeroshard against FSDP2.

    python benchmarks/unit_cost.py --ranks 2 --before COMMIT

60 tiny blocks, each a unit, compute next to nothing. A turn is a whole step: forward, backward, optimizer,
zero_grad. All engines are in one process per rank and take turns. The cost of an engine is the median of the
differences to plain PyTorch in the same round, over the number of blocks. One rank counts the time of the
thread on a core; several count wall time from a barrier on, with the exchanges.

With two ranks or more a further row has the exchanges alone: the two all-gathers and the reduce-scatter of
each unit as bare sends and receives of torch.distributed, one ahead of the one that is waited for, without
hooks, copies, sums and an optimizer. Units so small have more under way, so an engine may take less.
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
    parser = command_line(__doc__, ranks=1, stage=3, blocks=60, rounds=40)
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
    engine, optimizer, *_ = package.initialize(build_model(args.blocks), adamw, config)
    return engine, optimizer


def fsdp2(args: argparse.Namespace) -> tuple[Callable[[Tensor], Tensor], Any]:
    """torch's fully_shard of every block and of the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), build_model(args.blocks)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model.parameters())


def bare_exchanges(args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that sends and receives the shards of all units, three times each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = sum(p.numel() for p in Block().parameters())
    own, others = torch.zeros(numel // size), torch.zeros(size, numel // size)
    peers = [peer for peer in range(size) if peer != rank]

    def issue(tag: int) -> list[Any]:
        received = [dist.irecv(others[peer], peer, tag=tag) for peer in peers]
        return received + [dist.isend(own, peer, tag=tag) for peer in peers]

    def step() -> None:
        ahead: list[Any] = []
        for number in range(3 * args.blocks):
            ahead.append(issue(number))
            if number:
                for work in ahead.pop(0):
                    work.wait()
        for work in ahead.pop():
            work.wait()

    return step


def step(model: Callable[[Tensor], Tensor], optimizer: Any, x: Tensor) -> None:
    """Take a whole step."""
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(args: argparse.Namespace) -> None:
    """Take turns, and write the costs."""
    plain = build_model(args.blocks)
    engines = {
        "plain": (plain, adamw(plain.parameters())),
        "zeroshard": sharded(importlib.import_module("zeroshard"), args),
        "fsdp2": fsdp2(args),
    }
    if args.before:
        engines["before"] = sharded(load(), args)
    clock = time.thread_time if args.ranks == 1 else time.perf_counter
    x = torch.randn(2, WIDTH)

    def turn(call: Callable[[], None]) -> float:
        dist.barrier()
        start = clock()
        call()
        return clock() - start

    calls = {name: partial(step, *engine, x) for name, engine in engines.items()}
    calls["exchanges alone"] = bare_exchanges(args)
    times = in_turns({name: partial(turn, call) for name, call in calls.items()}, args.rounds, warmup=5)
    bare = [seconds / args.blocks * 1e6 for seconds in times.pop("exchanges alone")]
    if dist.get_rank():
        return
    costs = {
        name: [(a - b) / args.blocks * 1e6 for a, b in zip(own, times["plain"], strict=True)]
        for name, own in times.items()
        if name != "plain"
    }
    rows = {f"{name}, us a unit beyond plain": median_of(cost)._asdict() for name, cost in costs.items()}
    rows |= {
        f"ratio zeroshard/{name}": median_ratio(costs["zeroshard"], cost)._asdict()
        for name, cost in costs.items()
        if name != "zeroshard"
    }
    if args.ranks > 1:
        rows["exchanges alone, us a unit"] = median_of(bare)._asdict()
        rows["ratio exchanges alone/fsdp2"] = median_ratio(bare, costs["fsdp2"])._asdict()
    name = args.name or f"unit_cost_{args.ranks}ranks_stage{args.stage}"
    record.report("unit_cost", name, rows, settings=vars(args))


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
