"""`zeroshard doctor`: the facts of this machine, and those between the ranks that torchrun has started."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.torch_version import TorchVersion

from zeroshard.agreement import describe_versions
from zeroshard.cli.options import DoctorOptions
from zeroshard.comm.collectives import Axis
from zeroshard.comm.device import available_backends, use_device
from zeroshard.comm.lifecycle import start_world
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.streams import mark_here
from zeroshard.memory.budget import folders_of_groups, host_bytes_free
from zeroshard.stores.files import Swap
from zeroshard.stores.host import host_memory
from zeroshard.stores.swapfile import check_folder
from zeroshard.tables import format_bytes, render
from zeroshard.version import installed_version

_TIMEOUT_S = 120.0
"""Seconds that a rank waits for the others; ranks that import slowly come seconds apart."""

Facts = dict[str, Any]
"""Facts as plain values, sizes in bytes: of a rank, of its disk, or of a collective."""


def doctor(options: DoctorOptions) -> None:
    """Run `zeroshard doctor`. Rank 0 prints, its own facts before it waits for the other ranks."""
    if options.disk is not None:
        check_folder(options.disk)
    facts, is_first = read_facts(), os.environ.get("RANK", "0") == "0"
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1

    def say(text: str) -> None:
        if is_first and not options.json:
            print(text, flush=True)

    say(describe(facts))
    world = None if is_alone else start_world(use_device(options.device), _TIMEOUT_S)
    everyone = [facts] if world is None else world.all_gather_object(facts, "facts of the ranks")
    differing, disks, found = differences(everyone), list[Facts](), list[Facts]()
    if differing:
        say("\n  ".join(("\nversions that differ", *differing)))
    if options.disk is not None:
        own = measure_disk(options.disk, 0 if world is None else world.rank)
        disks = [own] if world is None else world.all_gather_object(own, "speeds of the disks")
        say(_table(f"disk of {options.disk}, 256 MiB a rank{', all at once' * (len(disks) > 1)}", disks))
    if world is not None:
        found = measure_bandwidth(world)
        where = f"{world.size} ranks on {world.device}"
        say(_table(f"collectives of {where}; each rank sends at this rate", found))
    if is_first and options.json:
        result = {"ranks": everyone, "differences": differing, "disks": disks, "bandwidth": found}
        print(json.dumps(result, indent=2))


def read_facts() -> Facts:
    """Read the facts of this process."""
    machine = read_machine()
    problems = check_machine(machine)
    names = dict.fromkeys(["torch", "numpy", *(name for needed in FEATURES.values() for name in needed)])
    packages = {name: read_package(name) for name in names if name not in problems}
    problems |= {name: package["problem"] for name, package in packages.items()}
    features = judge(problems)
    return {"versions": read_versions(), "packages": packages, "machine": machine, "features": features}


def describe(facts: Facts) -> str:
    """Return the facts of a rank as text."""
    versions = dict(facts["versions"])
    for name, package in facts["packages"].items():
        versions[name] = package["problem"] or versions.get(name) or package["version"]
    features = {name: "yes" if works is True else f"no: {works}" for name, works in facts["features"].items()}
    blocks = {"versions": versions, "machine": _texts(facts["machine"]), "features": features}
    return "\n\n".join(
        "\n".join((title, *(f"  {name:<33} {text}" for name, text in rows.items())))
        for title, rows in blocks.items()
    )


def _texts(facts: Facts) -> dict[str, str]:
    """Return facts as text, by names for people; without those that are not there."""
    return {name.replace("_", " "): _text(name, fact) for name, fact in facts.items() if fact != ""}


def _text(name: str, fact: Any) -> str:
    if isinstance(fact, list):
        return "\n".ljust(37).join(", ".join(map(" ".join, _texts(of).items())) for of in fact) or "none"
    if isinstance(fact, float) and name != "cpu_limit":
        return f"{1000 * fact:.3f} ms" if name == "seconds" else f"{fact / 1e9:.2f} GB/s"
    if isinstance(fact, int) and name not in ("cores", "rank"):
        return format_bytes(fact)
    return "none" if fact is None else str(fact)


def _table(title: str, facts: Sequence[Facts]) -> str:
    """Return a table of speeds, and the notes about disks."""
    left_out = ("folder", "note")
    rows = [_texts({name: fact for name, fact in of.items() if name not in left_out}) for of in facts]
    table = render(title, list(rows[0]), [list(row.values()) for row in rows])
    return "\n".join(("", table, *{of["note"]: None for of in facts if of.get("note")}))


def differences(everyone: Sequence[Facts]) -> list[str]:
    """Return a sentence for each version that is not the same on all ranks."""
    versions = [
        {**facts["versions"], **{name: package["version"] for name, package in facts["packages"].items()}}
        for facts in everyone
    ]
    names = dict.fromkeys(name for own in versions for name in own)
    each = {name: [str(own.get(name) or "not installed") for own in versions] for name in names}
    return [f"{name}: {describe_versions(own)}" for name, own in each.items() if len(set(own)) > 1]


# ----------------------------------------------------------------------------------------------- versions

RANGES: Mapping[str, tuple[str, str | None]] = {
    "torch": ("2.11", "2.16"),
    "bitsandbytes": ("0.49", None),
    "transformers": ("5", None),
    "accelerate": ("1.12", None),
    "lightning": ("2.5", None),
    "trl": ("1", None),
}
"""The least version of a package, as `pyproject.toml` has it, and the first one that is too new."""

_BINARY = ("bitsandbytes", "numba", "triton")
"""Packages with machine code of their own, which may be installed and yet not load. One rank of a node
imports them, as that takes seconds."""


def read_package(name: str) -> dict[str, Any]:
    """Return the version of a package, None without one, and its problem or ""."""
    least, end = RANGES.get(name, ("0", None))
    found, problem = None, ""
    try:
        found = TorchVersion(version(name))
        if found < least:
            problem = f"expected {name} {least} or newer, got {found}"
        elif end is not None and found >= end:
            problem = f"expected {name} before {end}, got {found}"
        elif name in _BINARY and os.environ.get("LOCAL_RANK", "0") == "0":
            logging.getLogger(name).setLevel(logging.ERROR)  # bitsandbytes logs parts that it goes without
            import_module(name)
    except PackageNotFoundError:
        problem = f"{name} is not installed: pip install {name}"
    except Exception as error:  # whatever its libraries make it raise
        problem = f"{name} {found} does not load: {_first_line(error)}"
    return {"version": found and str(found), "problem": problem}


def read_versions() -> dict[str, str]:
    """Return the versions of Python, zeroshard, and the libraries that torch was built with."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in available_backends() else None
    found = {
        "Python": platform.python_version(),
        "zeroshard": installed_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none: this torch is built without it",
        "ROCm of torch": torch.version.hip,
        "NCCL of torch": nccl,
    }
    return {name: str(version) for name, version in found.items() if version}


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# -------------------------------------------------------------------------------------------- the machine


def read_machine() -> dict[str, Any]:
    """Read the facts of this machine as this process sees it."""
    import psutil

    accelerator, why_none = _find_accelerator()
    groups, root = "", Path("/sys/fs/cgroup")
    with suppress(OSError):
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    has_shm = Path("/dev/shm").is_dir()  # workers of a DataLoader send batches through it
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cpu_limit": limit_of_groups(groups, root, "cpu"),
        "memory": psutil.virtual_memory().total,
        "memory_free": host_bytes_free(),
        "memory_limit": limit_of_groups(groups, root, "memory"),
        "swap": psutil.swap_memory().total,
        "shared_memory": shutil.disk_usage("/dev/shm").total if has_shm else None,
        "accelerator": accelerator,
        "why_none": why_none,
        "devices": read_devices(accelerator),
    }


def _find_accelerator() -> tuple[str | None, str]:
    """Return the type of the accelerators that torch sees, and the reason if it sees none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return found.type, ""
    if not (torch.version.cuda or torch.version.hip):
        return None, f"torch {torch.__version__} is built for CPUs alone"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return None, _first_line(error).partition(". ")[0]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None, "torch sees no device" + ("" if shown is None else f"; CUDA_VISIBLE_DEVICES is {shown!r}")


def read_devices(accelerator: str | None) -> list[dict[str, Any]]:
    """Return the devices of a type that this process sees; none for None."""
    if accelerator is None:
        return []
    # To ask for free memory makes a context on the device, of hundreds of MB: one rank of a node does.
    module, asks = torch.get_device_module(accelerator), os.environ.get("LOCAL_RANK", "0") == "0"
    found = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        free = module.mem_get_info(index)[0] if asks else None
        numbers = (getattr(properties, name, None) for name in ("major", "minor"))
        capability = ".".join(str(number) for number in numbers if number is not None)
        sizes = {"free": free, "total": properties.total_memory}
        found.append({"name": properties.name, **sizes, "compute_capability": capability})
    return found


_LIMITS = {
    "memory": (("memory.max",), ("memory.limit_in_bytes",)),
    "cpu": (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
}
"""The files of a limit in a control group of version 2 and of version 1."""
_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number near 2**63 where there is no limit on the memory."""


def limit_of_groups(groups: str, root: Path, controller: str) -> float | None:
    """Return the least limit of a control group on this process: bytes, or cores; None without one.

    Args:
        groups: the content of /proc/self/cgroup.
        root: the folder of all groups.
        controller: "memory" or "cpu".
    """
    limits = []
    for folder, is_first_version in folders_of_groups(groups, root, controller):
        with suppress(OSError):
            files = _LIMITS[controller][is_first_version]
            words = " ".join((folder / file).read_text(encoding="utf-8") for file in files).split()
            if all(map(str.isdecimal, words)):  # "max" and -1 are no limits
                limit, period = map(int, (*words, "1")[:2])
                limits.append(limit if period == 1 else limit / period)
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


# ------------------------------------------------------------------------------------------- the features


def check_machine(machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the problem of each check of a machine, or ""."""
    kind, backends, has_bf16 = machine["accelerator"], available_backends(), True
    if kind is not None:
        check = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
        has_bf16 = check is None or check(including_emulation=False)
    has_compiler = shutil.which("g++") or shutil.which("clang++")  # the names that torch.compile looks for
    return {
        "Gloo": "" if "gloo" in backends else "this torch has no Gloo",
        "GPU": machine["why_none"],
        "NCCL": "" if kind != "cuda" or "nccl" in backends else "this torch has no NCCL",
        "several GPUs": "this process sees one GPU" if len(machine["devices"]) == 1 else "",
        "bfloat16": "" if has_bf16 else "the device computes bfloat16 by emulation, if at all",
        "compiler": "" if has_compiler else "no C++ compiler on the path: g++ or clang++",
    }


FEATURES: Mapping[str, tuple[str, ...]] = {
    "ranks on CPUs (Gloo)": ("Gloo",),
    "ranks on GPUs": ("GPU", "NCCL"),
    "several ranks with a GPU each": ("GPU", "NCCL", "several GPUs"),
    "bfloat16 on the GPU": ("GPU", "bfloat16"),
    "compile=true on CPUs": ("compiler",),
    "8-bit states on CPUs, fast": ("numba",),
    "8-bit states on GPUs, fast": ("GPU", "triton"),
    "optimizers of bitsandbytes; QLoRA": ("bitsandbytes", "transformers"),
    "models of transformers": ("transformers", "safetensors"),
    "LoRA": ("peft",),
    "frozen weights of torchao": ("torchao",),
    "Trainer of transformers": ("transformers", "accelerate"),
    "trainers of TRL": ("trl", "accelerate"),
    "Lightning": ("lightning",),
    "pictures": ("matplotlib",),
    "logging to TensorBoard": ("tensorboard",),
    "logging to Weights & Biases": ("wandb",),
    "logging to MLflow": ("mlflow",),
}
"""The features in the order of a table, with the checks and the packages that each needs."""


def judge(problems: Mapping[str, str]) -> dict[str, str | bool]:
    """Return True for each feature that works here, or its problems.

    Args:
        problems: of each check and package; "" for none.
    """
    return {
        name: "; ".join(problems[check] for check in needed if problems[check]) or True
        for name, needed in FEATURES.items()
    }


# ------------------------------------------------------------------------------------------------ speeds

SIZES = (1 << 20, 16 << 20, 64 << 20)
"""Bytes of the whole buffer of a unit: a small one, and two of large layers."""
ROUNDS = 5


def measure_bandwidth(world: Axis, sizes: Sequence[int] = SIZES) -> list[Facts]:
    """Time all-gather and reduce-scatter of each size, and a small agreement; collective.

    Args:
        world: the axis of all ranks; with one rank the result is empty.
        sizes: bytes of the whole buffers.

    Returns:
        For each the median seconds of the rounds on the slowest rank, and the bytes that each rank sends in a
        second: (N - 1) / N of the buffer. nccl-tests calls it the bus bandwidth.
    """
    if world.size == 1:
        return []

    def waited(begin: Callable[[], Any]) -> Callable[[], object]:
        return lambda: begin().wait()

    runs: list[tuple[str, int, Callable[[], object]]] = []
    for size in sizes:
        each = size // 4 // world.size
        flat, own = (torch.ones(num, device=world.device) for num in (each * world.size, each))
        pool = BufferPool(world.device)
        gather = partial(world.all_gather, flat, own, tag=0, label="all-gather of the doctor")
        reduce = partial(world.reduce_scatter, flat, own, pool, tag=1, label="reduce-scatter of the doctor")
        runs += [("all-gather", flat.nbytes, waited(gather)), ("reduce-scatter", flat.nbytes, waited(reduce))]
    runs.append(("agreement of a step", 0, lambda: world.any([True], "agreement of the doctor")()))
    found = []
    for name, num_bytes, run in runs:
        seconds = _time(world, run)
        rate = num_bytes * (world.size - 1) / world.size / seconds
        found.append({"collective": name, "num_bytes": num_bytes, "seconds": seconds, "bytes_per_s": rate})
    return found


def _time(world: Axis, run: Callable[[], object]) -> float:
    """Return the median seconds of a collective on the slowest rank; the first round is not timed."""
    seconds = []
    for number in range(ROUNDS + 1):
        world.any([True], "begin of a round")()  # all ranks begin together
        start = time.perf_counter()
        run()
        mark_here(world.device).synchronize()
        if number:
            seconds.append(time.perf_counter() - start)
    everyone: list[float] = world.all_gather_object(median(seconds), "times of the ranks")
    return max(everyone)


PART, NUM_PARTS, DISK_ROUNDS = 32 << 20, 8, 3
"""Bytes of a part, parts of a round, and rounds: 256 MiB are written and read three times."""


def measure_disk(folder: Path, rank: int = 0) -> Facts:
    """Write and read a file in a folder as offloaded states are, and remove it.

    Reads and writes go past the page cache where the file system has direct I/O; `note` says if it has none.

    Args:
        folder: an existing folder.
        rank: the rank, for the name of the file.

    Returns:
        The bytes per second of writes and of reads, medians of the rounds; free bytes; the type of the file
        system; and a warning about this place, "" for none.

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
        places = [swap.empty(PART) for _ in range(NUM_PARTS)]
    buffers = [host_memory(place.nbytes, pinned=False).fill_(17) for place in places]

    def run(move: Callable[..., Any]) -> float:
        begin = time.perf_counter()
        for transfer in list(map(move, places, buffers)):
            transfer.wait()
        return time.perf_counter() - begin

    seconds = [(run(swap.write), run(swap.read)) for _ in range(DISK_ROUNDS)]
    write, read = (needed / median(times) for times in zip(*seconds, strict=True))
    note = " ".join(str(warning.message).partition(": ")[2] for warning in caught)
    place = {"rank": rank, "folder": str(folder), "free": free}
    return {**place, "write": write, "read": read, "note": note}
