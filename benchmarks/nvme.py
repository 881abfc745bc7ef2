"""Speed of the nvme tier: three buffers take turns, against reading all and then writing all.

    python benchmarks/nvme.py --folder /mnt/nvme

An optimizer whose states lie in files reads the next part, steps, and writes the last one. Here nothing is
computed between, so the disk alone is timed. It is compared with one thread that reads each part by one call,
and then writes each by one call: the same bytes in the same parts, direct I/O, in a file whose blocks were
reserved and written before. Both take turns, in an order that changes every round.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from rich.table import Table

import record
from medians import median_of, median_ratio
from zeroshard.tiers.files import FileTransfer, Swap
from zeroshard.tiers.memory import host_memory

OURS, PEER = "three buffers", "sequential"
LEAST_RATIO = 0.7


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="on the disk; default the system's temporary one")
    parser.add_argument("--total", type=int, default=1024, help="MiB that are read and written in a round")
    parser.add_argument("--part", type=int, default=32, help="MiB of a buffer")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9, help="timed, after an untimed one")
    parser.add_argument("--name", default="nvme", help="of the JSON file in benchmarks/results")
    return parser.parse_args()


class Pipeline:
    """All parts go through three buffers: one is read, one belongs to the caller, one is written."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.swap = Swap([folder], rank=0, num_threads=args.threads)
        self.places = [self.swap.empty(args.part << 20) for _ in range(args.total // args.part)]
        self._buffers = [host_memory(self.places[0].nbytes, pinned=False) for _ in range(3)]
        for number, place in enumerate(self.places):
            self.swap.write(place, self._buffers[0].fill_(number % 251)).wait()

    def run(self) -> None:
        reads = {0: self._read(0)}
        writes = {}
        for number, place in enumerate(self.places):
            if number + 1 < len(self.places):
                if number >= 2:  # the buffer of the next part is that of the last but one
                    writes.pop(number - 2).wait()
                reads[number + 1] = self._read(number + 1)
            reads.pop(number).wait()
            writes[number] = self.swap.write(place, self._buffers[number % 3])
        for transfer in writes.values():
            transfer.wait()

    def _read(self, number: int) -> FileTransfer:
        return self.swap.read(self.places[number], self._buffers[number % 3])

    def check(self) -> None:
        """Raise an error unless each part still has its bytes."""
        for number, place in enumerate(self.places):
            self.swap.read(place, self._buffers[0]).wait()
            if not torch.all(self._buffers[0] == number % 251):
                raise RuntimeError(f"Expected the bytes of part {number}, got others")


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
def engines(args: argparse.Namespace) -> Iterator[dict[str, Pipeline | Sequential]]:
    """Both sides, in a folder that is removed at the end."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        ours, peer = Pipeline(Path(name), args), Sequential(Path(name), args)
        with closing(ours.swap), closing(peer):
            yield {OURS: ours, PEER: peer}
            ours.check()


def main() -> int:
    """Measure, print and write; fails if the speed is below what is promised."""
    args = parse()
    seconds: dict[str, list[float]] = {OURS: [], PEER: []}
    with engines(args) as sides:
        for number in range(-1, args.rounds):
            for name in sorted(sides, reverse=bool(number % 2)):
                start = time.perf_counter()
                sides[name].run()
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
    gigabytes = 2 * (args.total // args.part * args.part << 20) / 1e9
    speeds = {name: median_of([gigabytes / value for value in values]) for name, values in seconds.items()}
    ratio = median_ratio(seconds[PEER], seconds[OURS])
    table = Table("what", "median", "95% interval", title=f"{args.total} MiB read and written")
    rows = {f"{name}, GB/s": speed for name, speed in speeds.items()} | {"speed, ratio": ratio}
    for key, median in rows.items():
        table.add_row(key, f"{median.value:.2f}", f"[{median.low:.2f}, {median.high:.2f}]")
    console = record.console()
    console.print(table)
    path = record.write(
        args.name,
        {"summary": {key: median._asdict() for key, median in rows.items()}, "seconds": seconds},
        settings={key: value for key, value in vars(args).items() if key != "folder"},
        compared="the same bytes in the same parts; direct I/O and blocks that were written before",
    )
    console.print(f"wrote {path.relative_to(record.RESULTS.parent.parent)}")
    return int(ratio.value < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
