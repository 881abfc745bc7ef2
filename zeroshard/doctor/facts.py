"""The facts of one rank: versions, the machine, the features that work; and the differences between ranks."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroshard.comm.device import available_backends
from zeroshard.tiers.budget import folders_of_groups, host_bytes_free
from zeroshard.version import installed_version

LEAST: Mapping[str, str] = {
    "torch": "2.11",
    "numpy": "",
    "bitsandbytes": "0.49",
    "numba": "",
    "transformers": "5",
    "safetensors": "",
    "peft": "",
    "torchao": "",
    "accelerate": "1.12",
    "lightning": "2.5",
    "trl": "1",
    "matplotlib": "",
    "tensorboard": "",
    "wandb": "",
    "mlflow": "",
}
"""The packages, with the least version of each as `pyproject.toml` has it; "" for any."""

BEFORE: Mapping[str, str] = {"torch": "2.16"}
"""The version from which on a package is too new: nobody has tried it."""

_BINARY = ("bitsandbytes", "numba")
"""Packages with machine code of their own, which may be installed and yet not load. One rank of a node
imports them, as that takes seconds."""


class Package(NamedTuple):
    """A package: the version that is installed, and the reason if zeroshard cannot use it."""

    version: str | None
    """None: it is not installed."""
    problem: str
    """"" for none."""


def read_packages() -> dict[str, Package]:
    """Return the packages of `LEAST` by name."""
    return {name: _read(name, least) for name, least in LEAST.items()}


def _read(name: str, least: str) -> Package:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Package(None, f"{name} is not installed: pip install {name}")
    if least and numbers(found) < numbers(least):
        return Package(found, f"expected {name} {least} or newer, got {found}")
    if name in BEFORE and numbers(found) >= numbers(BEFORE[name]):
        return Package(found, f"expected {name} before {BEFORE[name]}, got {found}")
    if name in _BINARY and os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger(name).setLevel(logging.ERROR)  # bitsandbytes logs parts that it goes without
        try:
            import_module(name)
        except Exception as error:  # whatever its libraries make it raise
            return Package(found, f"{name} {found} does not load: {first_line(error)}")
    return Package(found, "")


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers at the begin of a version, for a comparison: 2.14.1+cu130 is (2, 14, 1)."""
    found: list[int] = []
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:  # 2.15.0rc1: a suffix ends the numbers
            break
    return tuple(found)


def read_builds() -> dict[str, str]:
    """Return the versions of Python, zeroshard, and the libraries that torch was built with."""
    found = {
        "Python": platform.python_version(),
        "zeroshard": installed_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none: this torch is built without it",
    }
    if torch.version.hip:
        found["ROCm of torch"] = torch.version.hip
    if torch.version.cuda:
        try:
            found["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
        except (AttributeError, RuntimeError):
            found["NCCL of torch"] = "none"
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ------------------------------------------------------------------------------------------ the machine

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number near 2**63 where there is no limit."""


class Device(NamedTuple):
    """An accelerator that this process sees."""

    name: str
    free: int | None
    """Bytes that no process has taken; None on ranks other than the first one of a node."""
    total: int
    """Bytes of the device."""
    capability: str
    """Such as "9.0"; "" where the type of device has none."""


class Machine(NamedTuple):
    """The machine as this process sees it; sizes in bytes."""

    host: str
    system: str
    cores: int
    """Cores that this process may run on."""
    cpu_limit: float | None
    """The least number of cores that a control group grants; None without a limit."""
    memory: int
    """Physical memory."""
    memory_free: int
    """Memory that this process can take, within the limits of its control groups."""
    memory_limit: int | None
    """The least limit of a control group; None without one."""
    swap: int
    shared_memory: int | None
    """Size of /dev/shm, through which workers of a DataLoader send batches; None where it is missing."""
    accelerator: str | None
    """The type of the devices; None: there are none."""
    why_none: str
    """The reason why torch sees no accelerator; "" if it sees one."""
    devices: tuple[Device, ...]


def read_machine() -> Machine:
    """Read the facts of this machine."""
    import psutil

    accelerator, why_none = _find_accelerator()
    groups = ""
    with suppress(OSError):
        groups = _GROUPS.read_text(encoding="utf-8")
    shared = None
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_limit=cpu_limit(groups, _ROOT),
        memory=psutil.virtual_memory().total,
        memory_free=host_bytes_free(),
        memory_limit=memory_limit(groups, _ROOT),
        swap=psutil.swap_memory().total,
        shared_memory=shared,
        accelerator=accelerator,
        why_none=why_none,
        devices=read_devices(accelerator),
    )


def _find_accelerator() -> tuple[str | None, str]:
    """Return the type of the accelerators that torch sees, and the reason if it sees none."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return found.type, ""
    if not (torch.version.cuda or torch.version.hip):
        return None, f"torch {torch.__version__} is built for CPUs alone"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return None, first_line(error).partition(". ")[0]
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        shown = os.environ["CUDA_VISIBLE_DEVICES"]
        return None, f"torch sees no device; CUDA_VISIBLE_DEVICES is {shown!r}"
    return None, "torch sees no device"


def read_devices(accelerator: str | None) -> tuple[Device, ...]:
    """Return the devices of a type that this process sees; none for None."""
    if accelerator is None:
        return ()
    # To ask for free memory makes a context on the device, of hundreds of MB: one rank of a node does.
    module, asks = torch.get_device_module(accelerator), os.environ.get("LOCAL_RANK", "0") == "0"
    found = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        free = module.mem_get_info(index)[0] if asks else None
        numbers = (getattr(properties, "major", None), getattr(properties, "minor", None))
        capability = "" if None in numbers else f"{numbers[0]}.{numbers[1]}"
        found.append(Device(properties.name, free, properties.total_memory, capability))
    return tuple(found)


def memory_limit(groups: str, root: Path) -> int | None:
    """Return the least limit on the memory of this process in bytes; None without one.

    Args:
        groups: the content of /proc/self/cgroup.
        root: the folder of all groups.
    """
    limits = []
    for folder, is_first_version in folders_of_groups(groups, root, "memory"):
        file = "memory.limit_in_bytes" if is_first_version else "memory.max"
        words = _words(folder / file)
        if words and words[0].isdecimal() and int(words[0]) < _UNLIMITED:
            limits.append(int(words[0]))
    return min(limits, default=None)


def cpu_limit(groups: str, root: Path) -> float | None:
    """Return the least number of cores that a control group grants; None without a limit.

    Arguments are those of `memory_limit`.
    """
    limits = []
    for folder, is_first_version in folders_of_groups(groups, root, "cpu"):
        if is_first_version:
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        else:
            words = _words(folder / "cpu.max")
        if len(words) == 2 and all(map(str.isdecimal, words)):  # "max" and -1 are no limits
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []


# ------------------------------------------------------------------------------------------ the features


class Feature(NamedTuple):
    """A part of zeroshard, and the reason if it does not work here."""

    name: str
    problem: str
    """"" if it works."""


class Installation(NamedTuple):
    """The facts about this installation that features depend on."""

    packages: Mapping[str, Package]
    machine: Machine
    backends: tuple[str, ...]
    """The backends of torch.distributed that this torch has."""
    compilers: tuple[str, ...]
    """Names of C++ compilers on the path."""
    has_bf16: bool | None
    """True if the device computes in bfloat16; None without a device."""


def find_compilers() -> tuple[str, ...]:
    """Return the C++ compilers on the path by the names that torch.compile looks for."""
    return tuple(name for name in ("g++", "clang++") if shutil.which(name))


def judge(found: Installation) -> list[Feature]:
    """Return all features, in the order of a table."""
    return [Feature(name, problem) for name, problem in _features(found)]


def _features(found: Installation) -> Iterator[tuple[str, str]]:
    machine, packages = found.machine, found.packages
    gloo = "" if "gloo" in found.backends else "this torch has no Gloo"
    nccl = "" if machine.accelerator != "cuda" or "nccl" in found.backends else "this torch has no NCCL"
    yield "ranks on CPUs (Gloo)", gloo
    yield "ranks on GPUs", machine.why_none or nccl
    yield "several ranks with a GPU each", machine.why_none or nccl or _needs_two(machine)
    bf16 = "" if found.has_bf16 is not False else "the device computes bfloat16 by emulation, if at all"
    yield "bfloat16 on the GPU", machine.why_none or bf16
    compiler = "" if found.compilers else "no C++ compiler on the path: g++ or clang++"
    yield "compile=true on CPUs", compiler
    yield "8-bit states on CPUs, fast", _all_of(packages, "numba")
    yield "8-bit states on GPUs, fast", machine.why_none or _all_of(packages, "bitsandbytes")
    yield "optimizers of bitsandbytes; QLoRA", _all_of(packages, "bitsandbytes", "transformers")
    yield "models of transformers", _all_of(packages, "transformers", "safetensors")
    yield "LoRA", _all_of(packages, "peft")
    yield "frozen weights of torchao", _all_of(packages, "torchao")
    yield "Trainer of transformers", _all_of(packages, "transformers", "accelerate")
    yield "trainers of TRL", _all_of(packages, "trl", "accelerate")
    yield "Lightning", _all_of(packages, "lightning")
    yield "pictures", _all_of(packages, "matplotlib")
    for name, package in (
        ("TensorBoard", "tensorboard"),
        ("Weights & Biases", "wandb"),
        ("MLflow", "mlflow"),
    ):
        yield f"logging to {name}", _all_of(packages, package)


def _needs_two(machine: Machine) -> str:
    return "" if len(machine.devices) > 1 else "this process sees one GPU"


def _all_of(packages: Mapping[str, Package], *names: str) -> str:
    return "; ".join(packages[name].problem for name in names if packages[name].problem)


# ----------------------------------------------------------------------------------------- all together


class Facts(NamedTuple):
    """The facts of one rank."""

    builds: Mapping[str, str]
    """Versions of Python, zeroshard, torch, and the libraries in torch."""
    packages: Mapping[str, Package]
    machine: Machine
    features: Sequence[Feature]

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return {
            "versions": dict(self.builds),
            "packages": {name: package._asdict() for name, package in self.packages.items()},
            "machine": self.machine._asdict()
            | {"devices": [device._asdict() for device in self.machine.devices]},
            "features": {feature.name: feature.problem or True for feature in self.features},
        }


def read_facts() -> Facts:
    """Read the facts of this process."""
    packages, machine = read_packages(), read_machine()
    has_bf16 = None if machine.accelerator is None else _has_bf16(machine.accelerator)
    found = Installation(packages, machine, available_backends(), find_compilers(), has_bf16)
    return Facts(read_builds(), packages, machine, judge(found))


def _has_bf16(accelerator: str) -> bool:
    check = getattr(torch.get_device_module(accelerator), "is_bf16_supported", None)
    return True if check is None else bool(check(including_emulation=False))


def differences(everyone: Sequence[Facts]) -> list[str]:
    """Return a sentence for each version that is not the same on all ranks."""
    found = []
    versions = [
        {**facts.builds, **{name: package.version for name, package in facts.packages.items()}}
        for facts in everyone
    ]
    for name in dict.fromkeys(name for own in versions for name in own):
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(versions):
            ranks.setdefault(own.get(name) or "not installed", []).append(rank)
        if len(ranks) > 1:
            words = (f"{version} on rank(s) {', '.join(map(str, who))}" for version, who in ranks.items())
            found.append(f"{name}: {'; '.join(words)}")
    return found
