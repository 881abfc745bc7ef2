"""Versions of the packages that zeroshard uses, and of the libraries in torch."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

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
    import torch

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
