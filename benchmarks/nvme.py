"""Speed of a step whose states lie in files, against reading the same bytes and then writing them.

    python benchmarks/nvme.py --folder /mnt/nvme

The engine reads the next part, steps, and writes the last one; main parameters stay in memory. It is compared
with one thread that reads each part by one call, and then writes each by one call: the same bytes in the same
parts, direct I/O, in a file whose blocks were reserved and written before. Both take turns, in an order that
changes every round.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

import record
import zeroshard
from medians import median_of, median_ratio
from turns import command_line, in_turns, seconds_of

OURS, PEER = "optimizer step", "sequential"
LEAST_RATIO = 0.9


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, name="nvme", rounds=9)
    parser.add_argument("--folder", type=Path, help="on the disk; default the system's temporary one")
    parser.add_argument("--total", type=int, default=1024, help="MiB that are read and written in a round")
    parser.add_argument("--part", type=int, default=32, help="MiB of the states of a unit")
    return parser.parse_args()


class Step:
    """The step of an engine with one rank: each unit has a part of the states, which AdamW changes."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        side = int((args.part << 20) / 8) ** 0.5  # two states of float32 for each element of a matrix
        blocks = [nn.Linear(int(side), int(side), bias=False) for _ in range(args.total // args.part)]
        model = nn.Sequential(*(nn.Sequential(block) for block in blocks))
        config = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(folder)}}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.engine = zeroshard.initialize(model, optimizer, config).engine
        self.engine.backward(self.engine(torch.ones(1, int(side))).square().mean())
        self.run()

    def run(self) -> None:
        self.engine.optimizer.step()
        len(self.engine.optimizer.state)  # whoever reads states finds them after the step

    def close(self) -> None:
        self.engine.close(restore=False)


class Sequential:
    """One thread reads each part by one call, and then writes each."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._size, self._num_parts = args.part << 20, args.total // args.part
        self._buffer = mmap.mmap(-1, self._size)
        self._file = os.open(folder / "sequential", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, self._size * self._num_parts)
        self._move(os.pwritev)

    def run(self) -> None:
        self._move(os.preadv)
        self._move(os.pwritev)

    def _move(self, call: Callable[..., int]) -> None:
        for number in range(self._num_parts):
            moved = call(self._file, [self._buffer], number * self._size)
            if moved != self._size:
                raise RuntimeError(f"Expected to move {self._size} bytes, got {moved}")

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def sides_of(args: argparse.Namespace) -> Iterator[dict[str, Step | Sequential]]:
    """Both sides, in a folder that is removed at the end."""
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as name,
        closing(Step(Path(name), args)) as ours,
        closing(Sequential(Path(name), args)) as peer,
    ):
        yield {OURS: ours, PEER: peer}


def main() -> int:
    """Measure, print and write; fails if the speed is below what is promised."""
    args = parse()
    with sides_of(args) as sides:
        seconds = in_turns(
            {name: partial(seconds_of, side.run) for name, side in sides.items()}, args.rounds, warmup=1
        )
    gigabytes = 2 * (args.total // args.part * args.part << 20) / 1e9
    speeds = {name: median_of([gigabytes / value for value in values]) for name, values in seconds.items()}
    ratio = median_ratio(seconds[PEER], seconds[OURS])
    rows = {f"{name}, GB/s": speed for name, speed in speeds.items()} | {"speed, ratio": ratio}
    record.report(
        "nvme",
        args.name,
        {"summary": {key: median._asdict() for key, median in rows.items()}, "seconds": seconds},
        settings={key: value for key, value in vars(args).items() if key != "folder"},
        compared="the same bytes in the same parts; direct I/O and blocks that were written before",
    )
    return int(ratio.value < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
