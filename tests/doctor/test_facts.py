"""The facts of the doctor: versions, limits, and the features that follow from them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zeroshard.cli import doctor
from zeroshard.cli.doctor import (
    RANGES,
    check_package,
    judge,
    page,
    read_machine,
    read_versions,
)

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def test_the_least_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(x for extra in project["optional-dependencies"].values() for x in extra),
    ]
    asked: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", line)
        if match is not None:
            asked[match[1]] = match[2]
            assert match[3] == RANGES.get(match[1], ("", None))[1]
    for name in ("pytest", "mkdocs-material", "torchdata"):  # no code of zeroshard imports them
        del asked[name]
    assert asked == {name: least for name, (least, _) in RANGES.items()}


def test_a_package_is_told_with_its_version_or_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "4.57.1", "torch": "2.16.0", "numba": "0.60", "peft": "0.21"}

    def version(name: str) -> str:
        from importlib.metadata import PackageNotFoundError

        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def broken(name: str) -> None:
        raise OSError(f"lib{name}.so: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "import_module", broken)
    for name, expected in {
        "peft": "",
        "transformers": "expected transformers 5 or newer, got 4.57.1",
        "torch": "expected torch before 2.16, got 2.16.0",
        "numba": "numba 0.60 does not load: libnumba.so: cannot open shared object file",
        "trl": "trl is not installed: pip install trl",
    }.items():
        assert check_package(name) == expected
    versions["torch"] = "2.14.1+cu130"
    assert check_package("torch") == ""
    assert {"peft": "0.21", "trl": "not installed"}.items() <= read_versions().items()


def see(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, *backends: str, has_bf16: bool = True, tools: str = "g++"
) -> None:
    """Let this process see so many GPUs, and the compilers named in `tools`."""
    module = SimpleNamespace(
        is_bf16_supported=lambda including_emulation: has_bf16,
        get_device_properties=lambda index: SimpleNamespace(name="H100"),
        mem_get_info=lambda index: (70 * GIB, 80 * GIB),
    )
    monkeypatch.setattr("shutil.which", lambda name: tools if name == tools else None)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_gpus)
    monkeypatch.setattr(doctor, "available_backends", lambda: backends)
    found = ("cuda", "") if num_gpus else (None, "torch is built for CPUs alone")
    monkeypatch.setattr(doctor, "_find_accelerator", lambda: found)
    monkeypatch.setattr(doctor, "check_package", lambda name: "")


def problems() -> dict[str, str]:
    return {name: answer for name, answer in judge(read_machine()[1]).items() if answer != "yes"}


def test_without_an_accelerator_its_features_give_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 0, "gloo")
    features = (
        "ranks on GPUs",
        "several ranks with a GPU each",
        "bfloat16 on the GPU",
        "8-bit states on GPUs, fast",
    )
    assert problems() == dict.fromkeys(features, "no: torch is built for CPUs alone")
    assert read_machine()[0]["accelerator"] == "none: torch is built for CPUs alone"


def test_features_follow_from_devices_backends_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 1, "gloo", "nccl")
    assert problems() == {"several ranks with a GPU each": "no: this process sees one GPU"}
    see(monkeypatch, 2, "gloo", "nccl")
    assert problems() == {}
    see(monkeypatch, 2, "gloo", has_bf16=False, tools="")
    found = problems()
    assert found["ranks on GPUs"] == "no: this torch has no NCCL"
    assert "emulation" in found["bfloat16 on the GPU"]
    assert found["compile=true on CPUs"].startswith("no: no C++ compiler")
    monkeypatch.setattr(doctor, "check_package", {"peft": "too old", "trl": "older"}.get)
    found = judge(read_machine()[1] | dict.fromkeys(set(doctor.PACKAGES) - {"peft", "trl"}, ""))
    assert (found["LoRA"], found["trainers of TRL"]) == ("no: too old", "no: older")


def test_the_page_shows_versions_devices_and_features(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 2, "gloo", "nccl")
    lines = [" ".join(line.split()) for line in page({"numba": "not installed"}).splitlines()]
    device = "H100, 70.00 GiB free of 80.00 GiB"
    assert lines.index(f"cuda:1 {device}") == lines.index(f"cuda:0 {device}") + 1
    assert {"versions", "numba not installed", "machine", "features", "LoRA yes"} <= set(lines)


def test_each_package_that_a_feature_needs_has_a_version() -> None:
    versions = read_versions().keys()
    assert {"torch", "numpy", "mlflow", "numba"} <= versions
    assert not {"GPU", "C++"} & versions
