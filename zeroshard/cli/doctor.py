"""`zeroshard doctor`: a page about this machine."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import socket
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.torch_version import TorchVersion

from zeroshard.cli.options import DoctorOptions
from zeroshard.comm.device import available_backends
from zeroshard.memory.budget import host_bytes_free
from zeroshard.tables import format_bytes
from zeroshard.version import installed_version

Rows = dict[str, str]
"""Text by name: a part of the page."""


def doctor(_: DoctorOptions) -> None:
    """Run `zeroshard doctor`."""
    print(page(read_versions()))


def page(versions: Rows) -> str:
    """Return the facts of this machine as text, with the features that work here."""
    machine, problems = read_machine()
    parts = {"versions": versions, "machine": machine, "features": judge(problems)}
    return "\n\n".join(
        "\n".join((title, *(f"  {name:<33} {text}" for name, text in rows.items())))
        for title, rows in parts.items()
    )


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
"""Packages with machine code of their own, which may be installed and yet not load."""


def read_versions() -> Rows:
    """Return the versions of Python, of torch's libraries, and of each package that a feature needs."""
    has_nccl = "nccl" in available_backends()
    found = {
        "Python": platform.python_version(),
        "zeroshard": installed_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none: this torch is built without it",
        "ROCm of torch": torch.version.hip,
        "NCCL of torch": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    }
    for name in ("numpy", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {name: text for name, text in found.items() if text}


def check_package(name: str) -> str:
    """Return the problem of a package; "" for none."""
    least, end = RANGES.get(name, ("0", None))
    try:
        found = TorchVersion(version(name))
        if found < least:
            return f"expected {name} {least} or newer, got {found}"
        if end is not None and found >= end:
            return f"expected {name} before {end}, got {found}"
        if name in _BINARY:
            logging.getLogger(name).setLevel(logging.ERROR)  # bitsandbytes logs parts that it goes without
            import_module(name)
    except PackageNotFoundError:
        return f"{name} is not installed: pip install {name}"
    except Exception as error:  # whatever its libraries make it raise
        return f"{name} {found} does not load: {_first_line(error)}"
    return ""


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# -------------------------------------------------------------------------------------------- the machine


def read_machine() -> tuple[Rows, Rows]:
    """Return the facts of this machine as this process sees it, and the problem of each check, or ""."""
    import psutil

    kind, why_none = _find_accelerator()
    backends, devices, has_bf16 = available_backends(), Rows(), True
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total
    facts = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(cores),
        "memory": f"{format_bytes(memory)}, {format_bytes(host_bytes_free())} free for this process",
    }
    if kind is not None:
        module = torch.get_device_module(kind)
        has_bf16 = module.is_bf16_supported(including_emulation=False) if kind == "cuda" else True
        for index in range(torch.accelerator.device_count()):
            free, total = map(format_bytes, module.mem_get_info(index))
            name = module.get_device_properties(index).name
            devices[f"{kind}:{index}"] = f"{name}, {free} free of {total}"
    has_compiler = shutil.which("g++") or shutil.which("clang++")  # the names that torch.compile looks for
    return facts | (devices or {"accelerator": f"none: {why_none}"}), {
        "Gloo": "" if "gloo" in backends else "this torch has no Gloo",
        "GPU": why_none,
        "NCCL": "" if kind != "cuda" or "nccl" in backends else "this torch has no NCCL",
        "several GPUs": "this process sees one GPU" if len(devices) == 1 else "",
        "BF16": "" if has_bf16 else "the device computes bfloat16 by emulation, if at all",
        "C++": "" if has_compiler else "no C++ compiler on the path: g++ or clang++",
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


# ------------------------------------------------------------------------------------------- the features

FEATURES: Mapping[str, tuple[str, ...]] = {
    "ranks on CPUs (Gloo)": ("Gloo",),
    "ranks on GPUs": ("GPU", "NCCL"),
    "several ranks with a GPU each": ("GPU", "NCCL", "several GPUs"),
    "bfloat16 on the GPU": ("GPU", "BF16"),
    "compile=true on CPUs": ("C++",),
    "8-bit states on CPUs, fast": ("numba",),
    "8-bit states on GPUs, fast": ("GPU", "triton"),
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
"""The features in the order of the page, with the checks and the packages, in lower case, that each needs."""

PACKAGES = tuple(dict.fromkeys(name for needed in FEATURES.values() for name in needed if name.islower()))


def judge(problems: Rows) -> Rows:
    """Return yes for each feature that works here, or its problems.

    Args:
        problems: of each check; "" for none. A package that is not there is looked at.
    """
    problems = {name: check_package(name) for name in ("torch", *PACKAGES)} | problems
    found = {
        name: "; ".join(problems[check] for check in needed if problems[check])
        for name, needed in FEATURES.items()
    }
    return {name: f"no: {reasons}" if reasons else "yes" for name, reasons in found.items()}
