"""`zeroshard doctor`: the facts of this machine, and those between the ranks that torchrun has started."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.device import use_device
from zeroshard.comm.lifecycle import close_at_exit, watch
from zeroshard.comm.mesh import open_world, start_process_group
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.streams import mark_here
from zeroshard.doctor.facts import Facts, Feature, Machine, differences, read_facts
from zeroshard.tables import format_bytes, render
from zeroshard.tiers.files import Swap
from zeroshard.tiers.memory import host_memory
from zeroshard.tiers.swapfile import check_folder, file_system

_TIMEOUT_S = 120.0
"""Seconds that a rank waits for the others; ranks that import slowly come seconds apart."""


def examine(options: Namespace) -> None:
    """Run `zeroshard doctor`. Rank 0 prints, its own facts before it waits for the other ranks."""
    if options.disk is not None:
        check_folder(options.disk)
    facts, is_first = read_facts(), os.environ.get("RANK", "0") == "0"
    speaks = is_first and not options.json
    if speaks:
        print(describe(facts), flush=True)
    world = _open(options.device)
    everyone = [facts] if world is None else world.all_gather_object(facts, "facts of the ranks")
    differing = differences(everyone)
    if speaks and differing:
        print("\nversions that differ", *(f"  {line}" for line in differing), sep="\n", flush=True)
    disks: list[DiskSpeed] = []
    if options.disk is not None:
        own = measure_disk(options.disk, 0 if world is None else world.rank)
        disks = [own] if world is None else world.all_gather_object(own, "speeds of the disks")
        if speaks:
            print(f"\n{describe_disks(disks)}", flush=True)
    found = [] if world is None else measure_bandwidth(world)
    if speaks and world is not None:
        print(f"\n{describe_bandwidth(found, world.size, str(world.device))}")
    if is_first and options.json:
        size = 1 if world is None else world.size
        result = {
            "ranks": [facts.to_json() for facts in everyone],
            "differences": differing,
            "disks": [disk._asdict() for disk in disks],
            "bandwidth": [speed._asdict() | {"bytes_per_s": speed.rate(size)} for speed in found],
        }
        print(json.dumps(result, indent=2))


def _open(device: str | None) -> Axis | None:
    """Return the axis of all ranks; None for a process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    chosen = use_device(device)
    started = start_process_group(chosen, _TIMEOUT_S)
    world = open_world(chosen, Counter(), _TIMEOUT_S)
    close_at_exit(world, owns_process_group=started)
    watch(world)
    return world


def describe(facts: Facts) -> str:
    """Return the facts of a rank as text."""
    installed = {name: package for name, package in facts.packages.items() if package.version}
    missing = [name for name, package in facts.packages.items() if not package.version]
    shown = dict(facts.builds)
    for name, package in installed.items():
        shown[name] = package.problem or shown.get(name) or str(package.version)
    if missing:
        shown["not installed"] = ", ".join(missing)
    works = [("yes" if not feature.problem else "no", feature) for feature in facts.features]
    lines = [f"  {word:<4} {feature.name}{_reason(feature)}" for word, feature in works]
    return "\n\n".join(
        (
            _block("versions", shown.items()),
            _block("machine", _machine(facts.machine)),
            "\n".join(("features", *lines)),
        )
    )


def _reason(feature: Feature) -> str:
    return f": {feature.problem}" if feature.problem else ""


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "host", f"{machine.host}, {machine.system}"
    limit = "" if machine.cpu_limit is None else f", limited to the time of {machine.cpu_limit:g}"
    yield "cores", f"{machine.cores}{limit}"
    yield (
        "memory",
        f"{format_bytes(machine.memory)}, {format_bytes(machine.memory_free)} free for this process",
    )
    limited = "none" if machine.memory_limit is None else format_bytes(machine.memory_limit)
    yield "limit of control groups", limited
    yield "swap", format_bytes(machine.swap)
    if machine.shared_memory is not None:
        yield "/dev/shm", format_bytes(machine.shared_memory)
    if not machine.devices:
        yield "accelerators", f"none: {machine.why_none}"
    for number, device in enumerate(machine.devices):
        capability = f", compute capability {device.capability}" if device.capability else ""
        free = "" if device.free is None else f", {format_bytes(device.free)} free"
        memory = format_bytes(device.total) + free
        yield f"{machine.accelerator}:{number}", f"{device.name}, {memory}{capability}"


def _block(title: str, rows: Any) -> str:
    return "\n".join((title, *(f"  {name:<24} {value}" for name, value in rows)))


def describe_disks(disks: Sequence[DiskSpeed]) -> str:
    """Return a table of the ranks' disks; ranks have measured at the same time."""
    rows = [
        (str(rank), disk.system, format_bytes(disk.free), _rate(disk.write), _rate(disk.read))
        for rank, disk in enumerate(disks)
    ]
    title = f"disk of {disks[0].folder}, 256 MiB a rank" + (", all at once" if len(disks) > 1 else "")
    table = render(title, ("rank", "file system", "free", "write", "read"), rows)
    notes = dict.fromkeys(disk.note for disk in disks if disk.note)
    return "\n".join((table, *notes))


def describe_bandwidth(found: Sequence[Bandwidth], num_ranks: int, device: str) -> str:
    """Return a table of the times of collectives."""
    rows = [
        (
            speed.collective,
            format_bytes(speed.num_bytes) if speed.num_bytes else "",
            f"{speed.seconds * 1000:.3f} ms",
            _rate(speed.rate(num_ranks)) if speed.num_bytes else "",
        )
        for speed in found
    ]
    title = f"collectives of {num_ranks} ranks on {device}; each rank sends at this rate"
    return render(title, ("collective", "buffer", "time", "rate"), rows)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


# ------------------------------------------------------------------------------------------------ speeds


SIZES = (1 << 20, 16 << 20, 64 << 20)
"""Bytes of the whole buffer of a unit: a small one, and two of large layers."""
ROUNDS = 5


class Bandwidth(NamedTuple):
    """The speed of a collective over all ranks."""

    collective: str
    num_bytes: int
    """Bytes of the whole buffer, of which each rank has one part."""
    seconds: float
    """The median of the rounds, on the slowest rank."""

    def rate(self, num_ranks: int) -> float:
        """Return the bytes per second that each rank sends: (N - 1) / N of the buffer in `seconds`.

        nccl-tests calls it the bus bandwidth of all-gather and reduce-scatter. An agreement has none: 0.
        """
        return self.num_bytes * (num_ranks - 1) / num_ranks / self.seconds


def measure_bandwidth(world: Axis, sizes: Sequence[int] = SIZES) -> list[Bandwidth]:
    """Time all-gather and reduce-scatter of each size, and a small agreement; collective.

    Args:
        world: the axis of all ranks; with one rank the result is empty.
        sizes: bytes of the whole buffers.
    """
    if world.size == 1:
        return []
    found = []
    for num_bytes in sizes:
        each = num_bytes // 4 // world.size
        flat = torch.ones(each * world.size, device=world.device)
        own, pool = torch.ones(each, device=world.device), BufferPool(world.device)

        def gather(flat: torch.Tensor = flat, own: torch.Tensor = own) -> None:
            world.all_gather(flat, own, tag=0, label="all-gather of the doctor").wait()

        def reduce(flat: torch.Tensor = flat, own: torch.Tensor = own, pool: BufferPool = pool) -> None:
            world.reduce_scatter(flat, own, pool, tag=1, label="reduce-scatter of the doctor").wait()

        found.append(Bandwidth("all-gather", flat.nbytes, _time(world, gather)))
        found.append(Bandwidth("reduce-scatter", flat.nbytes, _time(world, reduce)))
    agree = _time(world, lambda: world.any([True], "agreement of the doctor")())
    return [*found, Bandwidth("agreement of a step", 0, agree)]


def _time(world: Axis, run: Callable[[], object]) -> float:
    """Return the median seconds of a collective on the slowest rank; the first round is not timed."""
    seconds = []
    for number in range(ROUNDS + 1):
        world.any([True], "begin of a round")()  # all ranks begin together
        begin = time.perf_counter()
        run()
        mark_here(world.device).synchronize()
        if number:
            seconds.append(time.perf_counter() - begin)
    everyone: list[float] = world.all_gather_object(median(seconds), "times of the ranks")
    return max(everyone)


PART, NUM_PARTS, DISK_ROUNDS = 32 << 20, 8, 3
"""Bytes of a part, parts of a round, and rounds: 256 MiB are written and read three times."""


class DiskSpeed(NamedTuple):
    """The speed of the disk of a folder, for the rank that measured it."""

    folder: str
    system: str
    """The type of the file system; "unknown" where the system does not tell."""
    free: int
    write: float
    """Bytes per second, the median of the rounds."""
    read: float
    note: str
    """A warning about this place; "" for none."""


def measure_disk(folder: Path, rank: int = 0) -> DiskSpeed:
    """Write and read a file in a folder as offloaded states are, and remove it.

    Reads and writes go past the page cache where the file system has direct I/O; `note` tells if it has none.

    Args:
        folder: an existing folder.
        rank: the rank, for the name of the file.

    Raises:
        ValueError: the folder is not there, may not be written to, or has no room.
        RuntimeError: the disk is full.
    """
    check_folder(folder)
    needed, free = PART * NUM_PARTS, shutil.disk_usage(folder).free
    if free < 2 * needed:
        raise ValueError(f"--disk: expected {2 * needed >> 20} MiB free in {folder}, got {free >> 20}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        swap = Swap([folder], rank)
    try:
        extents = [swap.allocate(PART) for _ in range(NUM_PARTS)]
        buffers = [host_memory(extent.padded, pinned=False).fill_(17) for extent in extents]

        def run(move: object) -> float:
            begin = time.perf_counter()
            transfers = [move(*pair) for pair in zip(extents, buffers, strict=True)]  # type: ignore[operator]
            for transfer in transfers:
                transfer.wait()
            return time.perf_counter() - begin

        seconds = [(run(swap.write), run(swap.read)) for _ in range(DISK_ROUNDS)]
    finally:
        swap.close()
    write, read = (needed / median(times) for times in zip(*seconds, strict=True))
    note = " ".join(str(warning.message).partition(": ")[2] for warning in caught)
    return DiskSpeed(str(folder), file_system(folder) or "unknown", free, write, read, note)
