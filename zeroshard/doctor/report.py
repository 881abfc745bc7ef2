"""The facts of one rank, the features that work there, and the differences between several ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zeroshard.comm.device import available_backends
from zeroshard.doctor.bandwidth import Bandwidth
from zeroshard.doctor.disk import DiskSpeed
from zeroshard.doctor.machine import Machine, read_machine
from zeroshard.doctor.versions import Package, read_builds, read_packages
from zeroshard.tables import format_bytes, render


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
