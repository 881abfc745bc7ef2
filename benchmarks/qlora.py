"""Memory of QLoRA: a Llama of 1.1 B parameters, built without memory and quantized by parts, trains adapters.

    python benchmarks/qlora.py --ranks 2

Each rank tells its peak RSS after sharding and after the steps, the bytes of its parameters, and the seconds
that building and sharding took. All of it is one run: nothing is compared.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers

import record
import zeroshard
from before import run_on_ranks
from model import build_llama
from turns import command_line

VOCABULARY = 32000


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    sizes = {"blocks": 22, "width": 2048, "length": 64}
    return command_line(__doc__, name="qlora_1b", ranks=2, stage=3, steps=3, **sizes).parse_args(arguments)


def build(args: argparse.Namespace) -> Any:
    """A quantized Llama with adapters, without memory."""
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with zeroshard.deferred_init():
        model = build_llama(
            args.width,
            args.blocks,
            head=64,
            vocabulary=VOCABULARY,
            length=2048,
            intermediate_size=args.width * 11 // 4,
            num_key_value_heads=max(1, args.width // 512),
        ).to(torch.bfloat16)
        num = sum(parameter.numel() for parameter in model.parameters())
        return peft.get_peft_model(zeroshard.quantize(model, bits), adapters), num


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of the adapters."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


def peak_bytes() -> int:
    """The largest RSS of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def report(args: argparse.Namespace) -> None:
    """Train some steps; print and write the figures on rank 0."""
    start = time.perf_counter()
    model, num = build(args)
    engine = zeroshard.initialize(model, adamw, {"stage": args.stage}).engine
    found: dict[str, Any] = {"s to shard": time.perf_counter() - start, "peak bytes, sharded": peak_bytes()}
    tokens = torch.randint(VOCABULARY, (1, args.length))
    losses = [engine.train_batch({"input_ids": tokens}, tokens).item() for _ in range(args.steps)]
    found |= {
        "peak bytes, trained": peak_bytes(),
        "bytes of parameters": engine.memory_report().parameters,
        "losses": losses,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if not dist.get_rank():
        rows = {"parameters of the model": num, "ranks": everyone}
        record.report("qlora", args.name, rows, settings=vars(args))


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), report))
