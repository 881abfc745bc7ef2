"""`zeroshard doctor`: a page about this machine, or its rates."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.distributed import is_backend_available

from zeroshard.cli.options import DoctorOptions
from zeroshard.memory.budget import host_bytes_free
from zeroshard.planning.machine import measure_machine
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
    measures = options.json or options.disk is not None
    print(json.dumps(asdict(measure_machine(options.disk)), indent=2) if measures else page())


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
        "backends of torch": ", ".join(filter(is_backend_available, ("gloo", "nccl"))),
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
