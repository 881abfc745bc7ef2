"""`zeroshard doctor`: a page about this machine, or its rates."""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from zeroshard.cli.options import DoctorOptions
from zeroshard.comm.device import available_backends
from zeroshard.comm.streams import Stopwatch, has_streams
from zeroshard.memory.budget import host_bytes_free
from zeroshard.tables import format_bytes
from zeroshard.version import installed_version

FEATURES: Mapping[str, tuple[str, ...]] = {
    "8-bit states on CPUs, fast": ("numba",),
    "kernels of 8-bit states on GPUs": ("triton",),
    "optimizers of bitsandbytes; QLoRA": ("bitsandbytes", "transformers"),
    "models of transformers": ("transformers", "safetensors"),
    "LoRA": ("peft",),
    "Trainer of transformers": ("transformers", "accelerate"),
    "trainers of TRL": ("trl", "accelerate"),
    "Lightning": ("lightning",),
    "logging to TensorBoard": ("tensorboard",),
    "logging to Weights & Biases": ("wandb",),
    "logging to MLflow": ("mlflow",),
}
"""The features in the order of the page, with the packages that each needs."""

_BINARY = ("bitsandbytes", "numba", "triton")
"""Packages with machine code of their own, which may be installed and yet not load."""


def doctor(options: DoctorOptions) -> None:
    """Run `zeroshard doctor`."""
    if options.disk is not None and not options.json:
        raise ValueError("--disk needs --json")
    print(json.dumps(asdict(measure_machine(options.disk)), indent=2) if options.json else page())


def page() -> str:
    """Return the facts of this machine as text, with the features whose packages are here."""
    features = {feature: check_packages(needed) for feature, needed in FEATURES.items()}
    parts = {"versions": read_versions(), "machine": read_machine(), "features": features}
    return "\n\n".join(
        "\n".join((title, *(f"  {name:<33} {text}" for name, text in rows.items())))
        for title, rows in parts.items()
    )


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of torch's libraries."""
    found = {
        "Python": platform.python_version(),
        "zeroshard": installed_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none: this torch is built without it",
        "ROCm of torch": torch.version.hip,
        "backends of torch": ", ".join(available_backends()),
        "numpy": version("numpy"),
    }
    return {name: text for name, text in found.items() if text}


def check_packages(names: Iterable[str]) -> str:
    """Return "yes" and the versions of packages, or "no" and the problems of some."""
    here, problems = [], []
    for name in names:
        try:
            here.append(f"{name} {version(name)}")
            if name in _BINARY:
                logging.getLogger(name).setLevel(logging.ERROR)  # bitsandbytes logs parts it goes without
                import_module(name)
        except PackageNotFoundError:
            problems.append(f"{name} is not installed: pip install {name}")
        except Exception as error:  # whatever its libraries make it raise
            problems.append(f"{here[-1]} does not load: {_first_line(error)}")
    return f"no: {'; '.join(problems)}" if problems else f"yes: {', '.join(here)}"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def read_machine() -> dict[str, str]:
    """Return the facts of this machine as this process sees it."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total
    facts = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(cores),
        "memory": f"{format_bytes(memory)}, {format_bytes(host_bytes_free())} free for this process",
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return facts | {"accelerator": f"none: {_why_none()}"}
    module = torch.get_device_module(accelerator.type)
    for index in range(torch.accelerator.device_count()):
        free, total = map(format_bytes, module.mem_get_info(index))
        name = module.get_device_properties(index).name
        facts[f"{accelerator.type}:{index}"] = f"{name}, {free} free of {total}"
    return facts


def _why_none() -> str:
    """Return the reason why torch sees no accelerator."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _first_line(error).partition(". ")[0]
    return f"torch sees no device; CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


# ------------------------------------------------------------------------------------------------- rates

_BYTES = 1 << 28
"""Bytes of a copy, and of the file."""
_WIDTHS = {"cpu": 1024}
"""The rows of a square matrix; 8192 on an accelerator."""
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates with nothing else under way; the best of some rounds."""

    device: str
    """The name of the accelerator, or "cpu"."""
    num_devices: int
    device_bytes: int
    """Memory of a device; on the CPU, of this process."""
    host_bytes: int
    """Host memory that this process can allocate."""
    flops: dict[str, float]
    """Operations per second of products of matrices, by dtype."""
    bandwidth: float
    """Bytes per second that the device reads or writes in its memory."""
    to_host: float | None = None
    """Bytes per second from the device to pinned host memory; None on the CPU."""
    from_host: float | None = None
    disk_write: float | None = None
    """Bytes per second to a new file, until it is on the disk; None if no folder was named."""
    disk_read: float | None = None


def measure_machine(folder: Path | None = None) -> Machine:
    """Measure the current accelerator, or the CPU, in some seconds.

    Args:
        folder: a folder on the disk to measure.

    Raises:
        OSError: the file cannot be made, written or read.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    width = _WIDTHS.get(device.type, 8192)

    def rate(amount: float, work: Callable[[], object]) -> float:
        work()  # kernels are loaded and memory is mapped
        watch = Stopwatch(device)
        for _ in range(_ROUNDS):
            with watch:
                work()
        return amount / max(min(watch.read()), 1e-9)

    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(width, width, dtype=dtype, device=device)
        product = functools.partial(torch.mm, matrix, matrix)
        flops[str(dtype).removeprefix("torch.")] = rate(2 * width**3, product)
    near, other = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    links: dict[str, float] = {}
    if has_streams(device):
        far = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        links["to_host"] = rate(_BYTES, lambda: far.copy_(near, non_blocking=True))
        links["from_host"] = rate(_BYTES, lambda: near.copy_(far, non_blocking=True))
    free = host_bytes_free()
    return Machine(
        device=torch.get_device_module(device).get_device_name(device) if has_streams(device) else "cpu",
        num_devices=torch.accelerator.device_count() if has_streams(device) else 1,
        device_bytes=torch.accelerator.get_memory_info(device)[1] if has_streams(device) else free,
        host_bytes=free,
        flops=flops,
        bandwidth=rate(2 * _BYTES, lambda: other.copy_(near)),
        **links,
        **({} if folder is None else _disk_rates(folder)),
    )


def _disk_rates(folder: Path) -> dict[str, float]:
    watch, block = Stopwatch(torch.device("cpu")), bytes(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file, open(file.name, "r+b", buffering=0) as raw:
        with watch:
            for _ in range(_BYTES // len(block)):
                raw.write(block)
            os.fsync(raw.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        raw.seek(0)
        with watch:
            while raw.read(len(block)):
                pass
    write, read = watch.read()
    return {"disk_write": _BYTES / write, "disk_read": _BYTES / read}
