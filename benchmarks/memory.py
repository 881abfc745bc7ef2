"""Bytes that a rank holds by stage, world size and precision, against the formula.

    python benchmarks/memory.py --ranks 1,2,4 --precisions fp32,bf16

Measured after a backward and an optimizer step, with the gradients kept, in two ways:
`engine.memory_report()`, and by walking all live tensors and counting each storage once.
The sequence is short by default: activations are gone when the bytes are counted.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import record
import zeroshard
from engines import adamw
from launch import end_rank, give_result, inside_rank, process_group, result_of_ranks
from model import add_shape_arguments, build_model, build_tokens, next_token_loss, shape_from
from turns import command_line

STAGES = (0, 1, 2, 3)
KINDS = ("parameters", "gradients", "optimizer", "unsharded")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, name="memory")
    parser.add_argument("--ranks", default="1,2,4", help="comma-separated world sizes")
    parser.add_argument("--precisions", default="fp32,bf16", help="comma-separated, of fp32, bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_shape_arguments(parser)
    parser.set_defaults(sequence=16)
    return parser.parse_args(arguments)


def formula(stage: int, num_ranks: int, num_elements: int, precision: str) -> float:
    """Bytes of model state at rest on a rank, with fp32 AdamW.

    Args:
        num_elements: P, the padded size of all units.
    """
    whole, part = num_elements, num_elements / num_ranks
    if precision == "bf16":
        main, copy, states = (whole, 2 * whole, 8 * whole) if stage == 0 else (part, 2 * whole, 8 * part)
        return 4 * main + (copy if stage < 3 or num_ranks == 1 else 0) + 4 * main + states
    parameters = part if stage == 3 else whole
    gradients = part if stage >= 2 else whole
    states = whole if stage == 0 else part
    return 4 * parameters + 4 * gradients + 8 * states


def live_tensor_bytes() -> int:
    """Bytes of the storages of all live tensors, each storage once, gradients included."""
    gc.collect()
    storages: dict[int, int] = {}

    def add(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()

    with torch._C.DisableTorchFunctionSubclass():  # original parameters refuse to be looked at
        # Not isinstance: it would ask lazy proxies for their class, and so import what they stand for.
        for tensor in [item for item in gc.get_objects() if issubclass(type(item), Tensor)]:
            add(tensor)
            if tensor.is_leaf and tensor.grad is not None:  # a gradient has no Python object until asked for
                add(tensor.grad)
    return sum(storages.values())


def largest(value: float) -> float:
    """The largest of the ranks' values."""
    box = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def measure_one(args: argparse.Namespace, stage: int, precision: str, device: torch.device) -> dict[str, Any]:
    """Train one step at a stage; return the row of this configuration."""
    before = live_tensor_bytes()
    shape = shape_from(args)
    model = build_model(shape, device)
    config: dict[str, Any] = {"stage": stage}
    if precision == "bf16":
        config["precision"] = {"param_dtype": "bfloat16"}
    optimizer = adamw(model.parameters())
    engine, *_ = zeroshard.initialize(model, optimizer, config=config)
    tokens = build_tokens(shape, 1, dist.get_rank(), device)
    next_token_loss(engine(tokens[:, :-1]), tokens).backward()
    optimizer.step()

    report = engine.memory_report()
    counted = largest(live_tensor_bytes() - before)
    num_elements = sum(unit.numel for unit in engine.units)
    expected = formula(stage, dist.get_world_size(), num_elements, precision)
    return {
        "stage": stage,
        "ranks": dist.get_world_size(),
        "precision": precision,
        "padded_elements": num_elements,
        "parameters_without_padding": sum(
            p.numel() for p in build_model(shape, torch.device("cpu")).parameters()
        ),
        "formula_bytes": expected,
        "live_tensor_bytes": counted,
        "live_over_formula": counted / expected,
        "report_bytes": {kind: largest(getattr(report, kind)) for kind in (*KINDS, "peak_unsharded")},
        "left_by_the_one_before": before,
    }


def measure_ranks(args: argparse.Namespace) -> None:
    """Measure all stages and precisions at this world size."""
    with process_group(args.device) as device:
        give_result(
            [
                measure_one(args, stage, precision, device)
                for precision in args.precisions.split(",")
                for stage in STAGES
            ]
        )
    end_rank()


def measure(args: argparse.Namespace) -> None:
    """Start the ranks of each world size, then print and write."""
    counts = map(int, args.ranks.split(","))
    rows = [row for count in counts for row in result_of_ranks(__file__, sys.argv[1:], count)]
    rows.sort(key=lambda row: (row["precision"] != "fp32", row["ranks"], row["stage"]))
    record.report("memory", args.name, rows, settings=vars(args))


if __name__ == "__main__":
    (measure_ranks if inside_rank() else measure)(parse())
