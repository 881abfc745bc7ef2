"""Step time of a GPT over tensor ranks: zeroshard against torch's parallelize_module, and fully_shard on it.

    python benchmarks/tensor_parallel.py --ranks 2             # tp 2: against parallelize_module
    python benchmarks/tensor_parallel.py --ranks 4 --stage 3   # tp 2 x dp 2: and fully_shard of each block

Both divide the same layers: queries, keys, values and `up` by columns, `out` and `down` by rows, embedding
and head by tokens, with the logits gathered. torch gets its input of attention once for queries, keys and
values (`PrepareModuleInput`, as torchtitan's plan has it), so it adds up their gradients once. All engines
are in one process per rank and take turns; a time is that of a whole step from a barrier on, and a ratio is
the median of those of the same round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import record
import zeroshard
from before import run_on_ranks
from medians import median_of, median_ratio
from turns import check_near, command_line, in_turns

HEAD, VOCABULARY = 64, 4096
PLAN = {
    "tokens": "rowwise",
    "blocks.*.attention.[qkv]": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def parse() -> argparse.Namespace:
    """The command line."""
    sizes = {"width": 512, "blocks": 4, "batch": 4, "length": 128}
    return command_line(__doc__, ranks=2, tp=2, stage=0, rounds=20, **sizes).parse_args()


class Attention(nn.Module):
    """One that finds the number of its heads from the activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (layer(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        down: Tensor = self.down(F.gelu(self.up(self.second(x))))
        return x + down


class GPT(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(args: argparse.Namespace) -> GPT:
    """The same weights for all engines."""
    torch.manual_seed(0)
    return GPT(args.width, args.blocks)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all engines."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def ours(args: argparse.Namespace) -> tuple[Callable[[Tensor], Tensor], Any]:
    """An engine, and its optimizer."""
    config = {"stage": args.stage, "mesh": {"tp": args.tp}, "units": ["Block"]}
    engine, optimizer, *_ = zeroshard.initialize(build(args), adamw, config, tp_plan=PLAN)
    return engine, optimizer


def torchs(args: argparse.Namespace) -> tuple[Callable[[Tensor], Tensor], Any]:
    """torch's composition: parallelize_module, and fully_shard where there are data-parallel ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (args.ranks // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    model, block = build(args), {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    for inner in model.blocks:
        columns = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        parallelize_module(inner, mesh["tp"], block | columns | {"up": ColwiseParallel(), "attention": whole})
    if args.ranks > args.tp:
        for inner in model.blocks:
            fully_shard(inner, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model, adamw(model.parameters())


def measure(args: argparse.Namespace) -> None:
    """Take turns, and write the times."""
    own = dist.get_rank() // args.tp
    losses: dict[str, list[float]] = {}

    def side(name: str, model: Callable[[Tensor], Tensor], optimizer: Any) -> Callable[[], float]:
        """A step in each call, with the next tokens; it notes the loss."""
        found = losses.setdefault(name, [])

        def step() -> float:
            torch.manual_seed(len(found) * 100 + own)
            tokens = torch.randint(VOCABULARY, (args.batch, args.length + 1))
            dist.barrier()
            start = time.perf_counter()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
            found.append(loss.item())
            return seconds

        return step

    sides = {"zeroshard": side("zeroshard", *ours(args)), "torch": side("torch", *torchs(args))}
    times = in_turns(sides, args.rounds, warmup=3)
    check_near("losses", *(torch.tensor(losses[name]) for name in sides), farthest=1e-3)
    if dist.get_rank():
        return
    rows = {f"{name}, s a step": median_of(own)._asdict() for name, own in times.items()}
    rows["ratio zeroshard/torch"] = median_ratio(times["zeroshard"], times["torch"])._asdict()
    name = args.name or f"tensor_parallel_{args.ranks}ranks_stage{args.stage}"
    record.report("tensor_parallel", name, rows, settings=vars(args))


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
