"""Optimizers with 8-bit states: time of a step and bytes of state.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --elements 1000000 --rounds 3 --name quick_look

Each steps a parameter of its own with the same gradient, and they take turns, in an order that is shuffled
every round. The ratios to torch's fused float32 AdamW in the same round are compared. Before that, a check
compares the first steps of all, as far as 8 bits tell.

Then the states of the GPT of the other benchmarks are counted. `examples/finetune.py --optimizer NAME --plot
FILE` draws the losses of a training with one of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer

import record
import zeroshard
from medians import median_of, median_ratio
from model import Shape, build_model, build_tokens, next_token_loss
from turns import check_near, command_line, in_turns
from zeroshard.optim.eightbit import rules as own
from zeroshard.optim.eightbit.step import step_in_chunks

FUSED = "torch AdamW, fused, 32-bit"
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FARTHEST = 0.2
"""The largest distance of an 8-bit optimizer's first steps from the 32-bit ones, relative to their length."""

Build = Callable[[nn.Parameter], Optimizer]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, threads=2, rounds=20, warmup=2)
    parser.add_argument("--elements", type=int, default=32 * 2**20, help="of the parameter")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.warmup < 1:
        parser.error(f"Expected --warmup of at least 1 (steps are compared there), got {args.warmup}")
    return args


# ------------------------------------------------------------------------------------- who is compared


def bitsandbytes_8bit(parameter: nn.Parameter) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit([parameter], **HYPERPARAMETERS)


def torchao_8bit(parameter: nn.Parameter) -> Optimizer:
    """The optimizer of torchao. It compiles its step, and needs a compiler at run time."""
    from torchao.optim import AdamW8bit

    return AdamW8bit([parameter], **HYPERPARAMETERS)


def zeroshard_8bit(parameter: nn.Parameter) -> Optimizer:
    return zeroshard.optim.AdamW8bit([parameter], **HYPERPARAMETERS)


COMPARED: dict[str, Build] = {
    FUSED: lambda parameter: torch.optim.AdamW([parameter], **HYPERPARAMETERS, fused=True),
    "zeroshard AdamW8bit": zeroshard_8bit,
    "zeroshard AdamW8bit, torch operations": zeroshard_8bit,
    "bitsandbytes AdamW8bit": bitsandbytes_8bit,
    "torchao AdamW8bit": torchao_8bit,
}


def kernel_of(name: str) -> AbstractContextManager[Any]:
    """Take steps in this context with the kernel that the name gives."""
    if name.endswith("torch operations"):  # in a process of its own without numba, turns could not alternate
        return mock.patch.object(own, "take_step", lambda *given: step_in_chunks(*given[:5]))
    return nullcontext()


@dataclass
class Contender:
    """An optimizer with its parameter, and the measurements of it."""

    name: str
    parameter: nn.Parameter
    optimizer: Optimizer

    def step(self) -> float:
        """Take a step; return its seconds, those of the device included."""
        synchronize(self.parameter.device)
        start = time.perf_counter()
        with kernel_of(self.name):
            self.optimizer.step()
        synchronize(self.parameter.device)
        return time.perf_counter() - start

    def state_bytes(self) -> int:
        """The bytes of all tensors of state, each storage once."""
        values = self.optimizer.state[self.parameter].values()
        plain = [part for value in values if isinstance(value, Tensor) for part in plain_tensors(value)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}.values())


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or the tensors inside a subclass."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


def synchronize(device: torch.device) -> None:
    """Wait for the device's own work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------------------------------------------------------------------------------------------- measured


def start(args: argparse.Namespace, console: Console) -> tuple[list[Contender], dict[str, str]]:
    """Build all and let them take their first steps.

    Returns:
        The optimizers that could, and the reasons of the others.
    """
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(args.elements, generator=generator).mul_(0.02).to(args.device)
    gradient = torch.randn(args.elements, generator=generator).mul_(1e-3).to(args.device)
    ready: list[Contender] = []
    skipped: dict[str, str] = {}
    for name, build in COMPARED.items():
        parameter = nn.Parameter(initial.clone())
        parameter.grad = gradient
        try:
            contender = Contender(name, parameter, build(parameter))
            for _ in range(args.warmup):
                contender.step()
        except Exception as error:  # any error of a library that cannot run here
            skipped[name] = f"{type(error).__name__}: {error}"
            console.print(f"without {name}: {skipped[name]}", markup=False)
            continue
        ready.append(contender)
        with torch.no_grad():
            way, want = parameter - initial, ready[0].parameter - initial
        check_near(f"the first steps of {name}", way, want, FARTHEST)
    return ready, skipped


def at_rest() -> dict[str, float]:
    """Bytes of 8-bit states of the 33.7 M parameter GPT after a step, on one rank."""
    shape = Shape()
    model = build_model(shape, torch.device("cpu"))
    num_params = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = zeroshard.initialize(model, zeroshard.optim.AdamW8bit(model.parameters()))
    tokens = build_tokens(shape, 1, 0, next(engine.parameters()).device)
    engine.backward(next_token_loss(engine(tokens[:, :-1]), tokens))
    engine.step()
    num_bytes = engine.memory_report().optimizer
    return {"parameters": num_params, "bytes": num_bytes, "bytes_per_parameter": num_bytes / num_params}


def rows_of(contenders: list[Contender], times: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Seconds, their ratio to the fused optimizer's, and bytes of state."""
    return [
        {
            "optimizer": contender.name,
            "state_bytes_per_parameter": contender.state_bytes() / contender.parameter.numel(),
            "median_s": median_of(times[contender.name])._asdict(),
            "ratio_to_fused": median_ratio(times[contender.name], times[FUSED])._asdict(),
            "seconds": [round(value, 6) for value in times[contender.name]],
        }
        for contender in contenders
    ]


def main() -> int:
    """Time the steps, count the states, and write both."""
    args = parse()
    torch.set_num_threads(args.threads)
    console = record.console()
    contenders, skipped = start(args, console)
    rows = rows_of(contenders, in_turns({one.name: one.step for one in contenders}, args.rounds))
    gpt = at_rest()
    console.print(
        f"GPT of {gpt['parameters']:,} parameters: {gpt['bytes_per_parameter']:.4f} bytes of state each"
    )
    record.report(
        "optimizers",
        args.name or f"optimizers_{args.device}",
        {"steps": rows, "gpt_at_rest": gpt},
        settings=vars(args),
        skipped=skipped,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
