"""Growth of a rank's peak resident memory with each tier, against its bound; each in a fresh process.

    python benchmarks/offload_rss.py --folder /mnt/nvme
    python benchmarks/offload_rss.py --cases host-8bit,host-8bit-bf16 --depth 20   # 1 GB of states and more

- host: all model states on the host; the bound is 1.03 times the formula of `zeroshard.estimate`: parameters,
  gradients, optimizer states and gathered units. On a CPU rank the host is the device.
- nvme: states and parameters in files, and a step in the backward; the bound is 4 units of parameters and the
  host buffers of the estimate. All states are larger than that.

A tiny engine of the same setting is trained first, so that libraries and code are not counted. Then the peak
starts anew, and a model is built without memory, sharded and trained.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import record
import zeroshard
from model import GPT, Shape, add_shape_arguments, build_tokens, next_token_loss, shape_from
from turns import command_line

TINY = Shape(dim=64, depth=3, heads=4, vocabulary=64, sequence=32)
NUM_UNITS = 4
HOST_FACTOR = 1.03
ALL_IN_FILES = {"optimizer": "nvme", "parameters": "nvme", "step_in_backward": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting that is trained in a process of its own."""

    offload: dict[str, Any]
    """`Config.offload`, without nvme_path."""
    bits: int = 32
    """Of optimizer states."""
    precision: dict[str, str] | None = None
    """`Config.precision`."""

    @property
    def is_in_files(self) -> bool:
        """True if values lie in files."""
        return "nvme" in self.offload.values()

    def config(self, folder: Path) -> dict[str, Any]:
        """The config of its engine."""
        offload = self.offload | ({"nvme_path": str(folder)} if self.is_in_files else {})
        return {"stage": 3, "offload": offload, "precision": self.precision or {}}

    def optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Its optimizer."""
        if self.bits == 8:
            return zeroshard.optim.AdamW8bit(parameters, lr=1e-4)
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


ON_HOST = {"optimizer": "cpu", "parameters": "cpu"}
BF16 = {"param_dtype": "bf16", "main_dtype": "bf16"}
CASES = {
    "host": Case(offload=ON_HOST),
    "host-8bit": Case(offload=ON_HOST, bits=8),
    "host-8bit-bf16": Case(offload=ON_HOST, bits=8, precision=BF16),
    "nvme": Case(offload=ALL_IN_FILES),
    "nvme-8bit-bf16": Case(offload=ALL_IN_FILES, bits=8, precision=BF16),
}


def parse() -> argparse.Namespace:
    """The command line; the default sizes make 151 M parameters, 1.2 GB of optimizer states."""
    parser = command_line(__doc__, name="offload_rss", steps=3)
    parser.add_argument("--folder", type=Path, help="for the files; default the system's temporary one")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)  # of a process
    add_shape_arguments(parser)
    parser.set_defaults(dim=1024, depth=12, heads=16, vocabulary=1024, sequence=32)
    return parser.parse_args()


def train(shape: Shape, steps: int, case: Case, folder: Path) -> Any:
    """Build a model without memory, shard it and train; return its engine."""
    with zeroshard.deferred_init():
        model = GPT(shape)
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = case.optimizer
    engine = zeroshard.initialize(model, optimizer, case.config(folder)).engine
    tokens = build_tokens(shape, 1, 0, torch.device("cpu"))
    for _ in range(steps):
        loss = next_token_loss(engine(tokens[:, :-1]), tokens)
        engine.backward(loss)
        engine.step()
    return engine


def run_case(args: argparse.Namespace) -> None:
    """Train in this process and print a JSON row."""
    torch.set_num_threads(1)
    case, shape = CASES[args.case], shape_from(args)
    train(TINY, 2, case, args.folder)
    gc.collect()
    before = record.status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    engine = train(shape, args.steps, case, args.folder)
    growth = record.status_bytes("VmHWM") - before
    with torch.device("meta"):
        formula = zeroshard.estimate(
            GPT(shape), 1, case.config(args.folder), optimizer_bits=case.bits, host_computes=True
        )
    itemsize = 2 if case.precision else 4
    unit = itemsize * max(unit.numel for unit in engine.units)
    buffers = formula.host if case.is_in_files else 0
    bound = NUM_UNITS * unit + buffers if case.is_in_files else HOST_FACTOR * (formula.peak + formula.host)
    print(
        json.dumps(
            {
                "case": args.case,
                "num_params": sum(unit.numel for unit in engine.units),
                "states": formula.total + formula.nvme,
                "unit": unit,
                "buffers": buffers,
                "buffers_reported": engine.memory_report().host,
                "growth": growth,
                "bound": round(bound),
                "growth_of_formula": growth / (formula.peak + formula.host),
            }
        )
    )


def main() -> int:
    """Measure all cases, or be one; fails if a bound is broken."""
    args = parse()
    if args.case:
        run_case(args)
        return 0
    rows = []
    for case in args.cases.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--folder", folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    settings = {key: value for key, value in vars(args).items() if key not in ("folder", "case")}
    record.report("offload_rss", args.name, rows, settings=settings)
    return int(any(row["growth"] > row["bound"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
