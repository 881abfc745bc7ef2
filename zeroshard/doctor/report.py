"""The facts of one rank, and the differences between those of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zeroshard.comm.device import available_backends
from zeroshard.doctor.bandwidth import Bandwidth
from zeroshard.doctor.disk import DiskSpeed
from zeroshard.doctor.features import Feature, Found, find_compilers, judge
from zeroshard.doctor.machine import Machine, read_machine
from zeroshard.doctor.versions import Package, read_builds, read_packages
from zeroshard.tables import format_bytes, render


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
    found = Found(packages, machine, available_backends(), find_compilers(), has_bf16)
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
