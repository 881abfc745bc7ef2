"""The features that work in this installation, and the reason for each that does not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zeroshard.doctor.machine import Machine
from zeroshard.doctor.versions import Package


class Feature(NamedTuple):
    """A part of zeroshard, and the reason if it does not work here."""

    name: str
    problem: str
    """"" if it works."""


class Found(NamedTuple):
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


def judge(found: Found) -> list[Feature]:
    """Return all features, in the order of a table."""
    return [Feature(name, problem) for name, problem in _features(found)]


def _features(found: Found) -> Iterator[tuple[str, str]]:
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
