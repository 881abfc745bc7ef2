"""Step time and traffic of Muon: matrices divided over the ranks, against all matrices on every rank.

    python benchmarks/muon.py --ranks 2

The model is the matrices of a small Llama; gradients are given, and a turn is a step of the optimizer alone,
from a barrier on. `owners` is zeroshard's step: each matrix is orthogonalized by one rank. In `everywhere`
each rank gathers all slices, in one all-gather, and orthogonalizes all matrices; at stage 0 it has them
whole. Both are in one process per rank and take turns. The bytes are those that all ranks send in a step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import record
import zeroshard
from before import run_on_ranks
from launch import timed
from medians import median_of, median_ratio
from turns import command_line, in_turns
from zeroshard.optim import Deferred, Muon, wholes_here


def parse() -> argparse.Namespace:
    """The command line."""
    return command_line(__doc__, ranks=2, stage=3, width=384, blocks=4, rounds=20).parse_args()


class Block(nn.Module):
    """The matrices of a block of a Llama, with a head of keys and values for four of queries."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 4, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, width * 11 // 4, bias=False) for _ in range(2))
        self.down = nn.Linear(width * 11 // 4, width, bias=False)


def start(args: argparse.Namespace) -> tuple[Any, Muon]:
    """An engine over the model, and its optimizer; the same weights each time."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block(args.width) for _ in range(args.blocks))
    engine, optimizer, *_ = zeroshard.initialize(
        model, Muon(model.named_parameters()), {"stage": args.stage, "units": ["Block"]}
    )
    assert isinstance(optimizer, Muon)
    for number, p in enumerate(engine.parameters()):
        p.grad = torch.randn(p.numel(), generator=torch.Generator().manual_seed(number))
    return engine, optimizer


def everywhere(
    parameters: Sequence[Any], tensors: Sequence[Deferred], compute: Any, **_: Any
) -> list[Tensor]:
    """Gather all slices, compute with all matrices, keep this rank's slices."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.cat([tensor.make() for tensor in tensors]).view(torch.uint8)
    sizes: list[Any] = [None] * size
    dist.all_gather_object(sizes, [tensor.shape.numel() for tensor in tensors])  # small beside the slices
    longest = 2 * max(map(sum, sizes))
    padded = torch.cat([own, own.new_zeros(longest - len(own))])
    flat = own.new_empty(size * longest)
    dist.all_gather(list(flat.chunk(size)), padded)
    slices = [
        part[: 2 * sum(counts)].view(torch.bfloat16).split(counts)
        for part, counts in zip(flat.chunk(size), sizes, strict=True)
    ]
    wholes = [
        torch.cat([of_rank[number] for of_rank in slices]).view(p.full_shape)
        for number, p in enumerate(parameters)
    ]
    keys = [SimpleNamespace(parameter=number, part=0) for number in range(len(wholes))]
    updates = compute(wholes, keys)
    starts = [sum(counts[number] for counts in sizes[:rank]) for number in range(len(wholes))]
    return [
        update.reshape(-1)[first : first + tensor.shape.numel()]
        for update, first, tensor in zip(updates, starts, tensors, strict=True)
    ]


def measure(args: argparse.Namespace) -> None:
    """Time both on each rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    engine, optimizer = start(args)
    other_engine, other = start(args)
    other.wholes_of = everywhere if args.stage else wholes_here
    sides = {"owners": partial(timed, optimizer.step), "everywhere": partial(timed, other.step)}
    times = in_turns(sides, args.rounds, warmup=1)
    for p, q in zip(engine.parameters(), other_engine.parameters(), strict=True):
        assert torch.equal(p.detach(), q.detach()), "both give the same bits"
    engine.reset_comm_report()
    optimizer.step()
    report = engine.comm_report()
    sent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sent, (report.calls["all_to_all"], report.bytes_sent["all_to_all"]))
    if dist.get_rank():
        return
    numel = sum(p.full_shape.numel() for p in engine.parameters())
    rows = {f"{name}, s a step": median_of(own)._asdict() for name, own in times.items()}
    rows["ratio owners/everywhere"] = median_ratio(times["owners"], times["everywhere"])._asdict()
    rows["elements of all matrices"] = numel
    rows["all-to-alls of each rank in a step"] = [calls for calls, _ in sent]
    rows["bytes that each rank sends in a step"] = [num_bytes for _, num_bytes in sent]
    rows["bytes of all ranks an element"] = sum(num_bytes for _, num_bytes in sent) / numel
    name = args.name or f"muon_{args.ranks}ranks_stage{args.stage}"
    record.report("muon", name, rows, settings=vars(args))


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
