"""Optimizers with 8-bit states, and main parameters of bfloat16: time of a step, and bytes of state.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --elements 1000000 --rounds 3 --name quick_look
    python benchmarks/optimizers.py --main-dtypes --elements 17000000

Each steps parameters of its own with the same gradients, and they take turns, in an order that is shuffled
every round. The ratios to torch's fused float32 AdamW in the same round are compared. Before that, a check
compares the first steps of all, as far as 8 bits tell.

With --main-dtypes each has an engine of its own, on one rank, and ratios are those of main parameters of
bfloat16 to the same optimizer's in float32.

`examples/finetune.py --optimizer NAME --plot FILE` draws the losses of a training with one of them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from turns import check_near, command_line, in_turns, seconds_of
from zeroshard.optim.eightbit import rules as own
from zeroshard.optim.eightbit.step import step_in_chunks

FUSED, OURS = "torch AdamW, fused, 32-bit", "zeroshard AdamW8bit"
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FARTHEST = 0.2
"""The largest distance of an 8-bit optimizer's first steps from the 32-bit ones, relative to their length."""
FARTHEST_MAIN = 0.01
"""The largest distance between main parameters of the two dtypes after the first steps, relative to their
norm. bfloat16 has 8 bits of mantissa."""
DTYPES = ("fp32", "bf16")
NUM_PARAMETERS = 10
"""Of each engine: its elements are divided among them."""

Build = Callable[[Iterable[Tensor]], Optimizer]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, threads=2, rounds=20, warmup=2)
    parser.add_argument("--elements", type=int, default=32 * 2**20, help="of all parameters together")
    parser.add_argument("--main-dtypes", action="store_true", help="compare dtypes of main parameters")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.warmup < 1:
        parser.error(f"Expected --warmup of at least 1 (steps are compared there), got {args.warmup}")
    return args


# ------------------------------------------------------------------------------------- who is compared


def bitsandbytes_8bit(parameters: Iterable[Tensor]) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, **HYPERPARAMETERS)


def torchao_8bit(parameters: Iterable[Tensor]) -> Optimizer:
    """The optimizer of torchao. It compiles its step, and needs a compiler at run time."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, **HYPERPARAMETERS)


def zeroshard_8bit(parameters: Iterable[Tensor]) -> Optimizer:
    return zeroshard.optim.AdamW8bit(parameters, **HYPERPARAMETERS)


COMPARED: dict[str, Build] = {
    FUSED: lambda parameters: torch.optim.AdamW(parameters, **HYPERPARAMETERS, fused=True),
    OURS: zeroshard_8bit,
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
    """An optimizer with its parameters, and the measurements of it."""

    name: str
    parameters: Sequence[Tensor]
    optimizer: Optimizer
    engine: Any = None
    """The engine that has taken over the optimizer; kept here, since an optimizer does not."""

    def values(self) -> Tensor:
        """All parameters, [elements], float32."""
        return torch.cat([parameter.detach().float().flatten() for parameter in self.parameters])

    def step(self) -> float:
        """Take a step; return its seconds, those of the device included."""
        with kernel_of(self.name):
            return seconds_of(self.optimizer.step)

    def state_bytes(self) -> int:
        """The bytes of all tensors of state, each storage once."""
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        plain = [part for value in values if isinstance(value, Tensor) for part in plain_tensors(value)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}.values())


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or the tensors inside a subclass."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


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
            contender = Contender(name, [parameter], build([parameter]))
            for _ in range(args.warmup):
                contender.step()
        except Exception as error:  # any error of a library that cannot run here
            skipped[name] = f"{type(error).__name__}: {error}"
            console.print(f"without {name}: {skipped[name]}", markup=False)
            continue
        ready.append(contender)
        way, want = (one.values() - initial for one in (contender, ready[0]))
        check_near(f"the first steps of {name}", way, want, FARTHEST)
    return ready, skipped


def start_engines(args: argparse.Namespace) -> dict[tuple[str, str], Contender]:
    """Build an engine for each dtype of main parameters, and let it take its first steps."""
    found: dict[tuple[str, str], Contender] = {}
    for name, dtype in itertools.product((FUSED, OURS), DTYPES):
        generator = torch.Generator().manual_seed(0)
        size = args.elements // NUM_PARAMETERS
        values = (torch.randn(size, generator=generator).mul_(0.02) for _ in range(NUM_PARAMETERS))
        model = nn.ParameterList(values)
        optimizer = COMPARED[name](model.parameters())
        engine = zeroshard.initialize(model, optimizer, {"precision": {"main_dtype": dtype}}).engine
        parameters = list(engine.parameters())
        for parameter in parameters:
            parameter.grad = torch.randn(size, generator=generator).mul_(1e-3).to(parameter.dtype)
        found[name, dtype] = Contender(name, parameters, optimizer, engine)
        for _ in range(args.warmup):
            found[name, dtype].step()
        check_near(
            f"{dtype} of {name}", found[name, dtype].values(), found[name, "fp32"].values(), FARTHEST_MAIN
        )
    return found


def times_of(seconds: list[float], base: list[float], title: str) -> dict[str, Any]:
    """The seconds of steps, their median, and their ratio to others as `title`."""
    return {
        "median_s": median_of(seconds)._asdict(),
        title: median_ratio(seconds, base)._asdict(),
        "seconds": [round(value, 6) for value in seconds],
    }


def main() -> None:
    """Time the steps, and write them with the bytes of the states."""
    args = parse()
    torch.set_num_threads(args.threads)
    facts: dict[str, Any] = {
        "settings": vars(args),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if args.main_dtypes:
        engines = start_engines(args)
        times = in_turns({key: one.step for key, one in engines.items()}, args.rounds)
        rows = [
            {"optimizer": name, "main_dtype": dtype, **times_of(own, times[name, "fp32"], "ratio_to_fp32")}
            for (name, dtype), own in times.items()
        ]
        record.report("main_dtype", args.name or "main_dtype_cpu", rows, **facts)
        return
    contenders, skipped = start(args, record.console())
    seconds = in_turns({one.name: one.step for one in contenders}, args.rounds)
    steps = [
        {
            "optimizer": one.name,
            "state_bytes_per_parameter": one.state_bytes() / args.elements,
            **times_of(seconds[one.name], seconds[FUSED], "ratio_to_fused"),
        }
        for one in contenders
    ]
    name = args.name or f"optimizers_{args.device}"
    record.report("optimizers", name, {"steps": steps}, skipped=skipped, **facts)


if __name__ == "__main__":
    main()
