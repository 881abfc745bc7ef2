"""The rates of a machine, measured or named, and a cluster of such machines.

A cluster says how long operations, copies and exchanges take alone. An exchange takes its latency and the
time of the bytes that a rank sends. On an accelerator it runs beside compute; ranks on the CPU share their
cores with it, so that it takes the time of compute, with the sums that a reduction adds up.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.comm.streams import Stopwatch

_BYTES = 1 << 28
"""Bytes of a copy, and of the file."""
_WIDTHS = {"cpu": 1024}
"""The rows of a square matrix; 8192 on an accelerator."""
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates with nothing else under way; the best of some rounds.

    - device: the name of the accelerator, or "cpu".
    - device_bytes: memory of a device; on the CPU, of this process.
    - host_bytes: host memory that this process can allocate.
    - flops: operations per second of products of matrices, by dtype.
    - bandwidth: bytes per second that the device reads or writes in its memory.
    - to_host, from_host: bytes per second between the device and pinned host memory; None on the CPU.
    - disk_write, disk_read: bytes per second to a new file, until it is on the disk, and back; None if no
      folder was named.
    """

    device: str
    num_devices: int
    device_bytes: int
    host_bytes: int
    flops: dict[str, float]
    bandwidth: float
    to_host: float | None = None
    from_host: float | None = None
    disk_write: float | None = None
    disk_read: float | None = None


def measure_machine(folder: Path | None = None) -> Machine:
    """Measure the current accelerator, or the CPU, in some seconds.

    Args:
        folder: a folder on the disk to measure.

    Raises:
        OSError: the file cannot be made, written or read.
    """
    import torch  # rates of a cluster by its name need none of it

    from zeroshard.comm import streams
    from zeroshard.forwards.budget import measure_link
    from zeroshard.memory.budget import host_bytes_free

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    has_streams = streams.has_streams(device)
    width = _WIDTHS.get(device.type, 8192)

    def rate(amount: float, work: Callable[[], object]) -> float:
        work()  # kernels are loaded and memory is mapped
        watch = streams.Stopwatch(device)
        for _ in range(_ROUNDS):
            with watch:
                work()
        return amount / max(min(watch.read()), 1e-9)

    flops = {}
    for name in ("float32", "bfloat16"):
        matrix = torch.ones(width, width, dtype=getattr(torch, name), device=device)
        flops[name] = rate(2 * width**3, functools.partial(torch.mm, matrix, matrix))
    near, other = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    far, free = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda"), host_bytes_free()
    return Machine(
        device=torch.get_device_module(device).get_device_name(device) if has_streams else "cpu",
        num_devices=max(1, torch.accelerator.device_count()),
        device_bytes=torch.accelerator.get_memory_info(device)[1] if has_streams else free,
        host_bytes=free,
        flops=flops,
        bandwidth=rate(2 * _BYTES, lambda: other.copy_(near)),
        **(asdict(measure_link(device, far)) if has_streams else {}),
        **({} if folder is None else _disk_rates(folder, streams.Stopwatch(torch.device("cpu")))),
    )


def _disk_rates(folder: Path, watch: Stopwatch) -> dict[str, float]:
    values = bytearray(_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        with watch:
            file.write(values)
            file.flush()
            os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        with watch:
            file.readinto(values)
    write, read = watch.read()
    return {"disk_write": _BYTES / write, "disk_read": _BYTES / read}


# ----------------------------------------------------------------------------------------------- clusters


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines of one kind, and what lies between their ranks.

    - network, between: bytes per second that a rank sends to other ranks of its node, and to other nodes.
    - latency: seconds of an exchange without its bytes.
    - sums: bytes per second that a rank adds up after an exchange; 0 where the network's library does it.
    - efficiency: the share of the operations per second of large products that layers of a model reach.
    - is_measured: True if all of it was measured on the ranks that are there.

    Raises:
        ValueError: several ranks without a network, or several nodes without one between them.
    """

    name: str
    machine: Machine
    num_ranks: int
    ranks_per_node: int
    network: float = 0.0
    between: float = 0.0
    latency: float = 0.0
    sums: float = 0.0
    efficiency: float = 1.0
    is_measured: bool = False

    def __post_init__(self) -> None:
        for key in ("num_ranks", "ranks_per_node", "efficiency"):
            if getattr(self, key) <= 0:
                raise ValueError(f"cluster {self.name!r}: expected {key} above 0, got {getattr(self, key)}")
        for key, num in (("network", self.num_ranks), ("between", self.num_nodes)):
            if num > 1 and not getattr(self, key):
                raise ValueError(
                    f"cluster {self.name!r}: expected the key {key}, bytes per second that a rank sends to "
                    f"others, for {num} ranks or nodes: `zeroshard doctor` of one process does not measure it"
                )

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def shares_cores(self) -> bool:
        """True for ranks on the CPU, whose exchanges take the time of compute."""
        return self.machine.device == "cpu"

    def exchange(self, num_bytes: Any, num_exchanges: Any, *, span: int, adds: bool = False) -> Any:
        """Return the seconds of exchanges.

        Args:
            num_bytes: bytes that a rank sends in all of them; numbers or arrays.
            num_exchanges: their number.
            span: neighbouring ranks over which a group extends.
            adds: True if what arrives is added up.
        """
        rate = self.network if span <= self.ranks_per_node else min(self.network, self.between)
        per_byte = 1 / max(rate, 1.0) + (1 / self.sums if adds and self.sums else 0.0)
        return num_exchanges * self.latency + num_bytes * per_byte


def _gpu(name: str, memory: float, flops: float, bandwidth: float, link: float | None) -> Machine:
    return Machine(
        device=name,
        num_devices=8,
        device_bytes=int(memory * (1 << 30)),
        host_bytes=1 << 40,
        flops={"float32": flops / 8, "bfloat16": flops},
        bandwidth=bandwidth,
        to_host=link,
        from_host=link,
    )


_H100 = _gpu("H100", 79.2, 7e14, 3e12, 5e10)
_4090 = _gpu("RTX 4090", 23.6, 1.5e14, 9e11, 2.5e10)
_CPU = replace(_gpu("cpu", 8, 9.6e11, 1.2e10, None), num_devices=1)
_NODE: dict[str, Any] = {"ranks_per_node": 8, "latency": 2e-5, "efficiency": 0.8}
_CORES: dict[str, Any] = {"ranks_per_node": 2, "latency": 6e-4, "sums": 1.5e9}
CLUSTERS: Mapping[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster(name="8xH100", machine=_H100, num_ranks=8, network=3.5e11, **_NODE),
        Cluster(name="64xH100", machine=_H100, num_ranks=64, network=3.5e11, between=4.5e10, **_NODE),
        Cluster(name="8x4090", machine=_4090, num_ranks=8, network=1.2e10, **_NODE),
        Cluster(name="2xCPU", machine=_CPU, num_ranks=2, network=1.5e9, **_CORES),
    )
}
"""Clusters by name: memory as torch finds it; else data sheets, less what copies and products leave. Products
of one H200, which has the cores of an H100, reach 7.6e14 in benchmarks/results/offload_gpu_core.json."""


def read_cluster(given: str, num_ranks: int | None = None) -> Cluster:
    """Return the cluster with a name, or that of a JSON file.

    Args:
        given: a name of `CLUSTERS`; or a file with the JSON of `zeroshard doctor --json`, to which keys of a
            `Cluster` may be added.
        num_ranks: all ranks. None: as the cluster has them, or the devices of the machine.

    Raises:
        ValueError: no such name or file, or a key that nobody knows; several ranks without a network.
    """
    if given in CLUSTERS:
        return replace(CLUSTERS[given], num_ranks=num_ranks or CLUSTERS[given].num_ranks)
    path, known = Path(given), {field.name for field in fields(Machine)}
    if not path.is_file():
        raise ValueError(
            f"cluster: expected one of {', '.join(CLUSTERS)}, or a file of `zeroshard doctor --json`, got "
            f"{given!r}"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        machine = Machine(**{key: found.pop(key) for key in known & found.keys()})
        ranks = found.pop("num_ranks", machine.num_devices)
        found = {"name": path.stem, "ranks_per_node": ranks, **found, "num_ranks": num_ranks or ranks}
        return Cluster(machine=machine, **found)
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{given}: expected the JSON of `zeroshard doctor --json`: {error}") from None
