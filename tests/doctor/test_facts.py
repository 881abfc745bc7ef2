"""The facts of the doctor: versions, limits, and the features that follow from them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from zeroshard.cli.doctor import (
    FEATURES,
    RANGES,
    check_machine,
    describe,
    differences,
    judge,
    limit_of_groups,
    measure_disk,
    read_devices,
    read_facts,
    read_machine,
    read_package,
)

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
MACHINE = {
    "host": "node-1",
    "system": "Linux 6 x86_64",
    "cores": 8,
    "cpu_limit": None,
    "memory": 64 * GIB,
    "memory_free": 60 * GIB,
    "memory_limit": None,
    "swap": 0,
    "shared_memory": None,
    "accelerator": None,
    "why_none": "torch 2.14.1+cpu is built for CPUs alone",
    "devices": [],
}
GPU = {"name": "H100", "free": 70 * GIB, "total": 80 * GIB, "compute_capability": "9.0"}
CUDA = {"accelerator": "cuda", "why_none": ""}


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

    monkeypatch.setattr("zeroshard.cli.doctor.version", version)
    monkeypatch.setattr("zeroshard.cli.doctor.import_module", broken)
    for name, expected in {
        "peft": ("0.21", ""),
        "transformers": ("4.57.1", "expected transformers 5 or newer, got 4.57.1"),
        "torch": ("2.16.0", "expected torch before 2.16, got 2.16.0"),
        "numba": ("0.60", "numba 0.60 does not load: libnumba.so: cannot open shared object file"),
        "trl": (None, "trl is not installed: pip install trl"),
    }.items():
        assert tuple(read_package(name).values()) == expected
    versions["torch"] = "2.14.1+cu130"
    assert read_package("torch") == {"version": "2.14.1+cu130", "problem": ""}


def test_the_least_limit_of_all_groups_holds(tmp_path: Path) -> None:
    inner = tmp_path / "job" / "rank"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert limit_of_groups("0::/job/rank\n", tmp_path, "memory") is None
    assert limit_of_groups("0::/job/rank\n", tmp_path, "cpu") is None
    (tmp_path / "job" / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "job" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    assert limit_of_groups("0::/job/rank\n", tmp_path, "memory") == 8 * GIB
    assert limit_of_groups("0::/job/rank\n", tmp_path, "cpu") == 1.5


def test_limits_of_version_1_are_read_too(tmp_path: Path) -> None:
    groups = "4:memory:/job\n3:cpu,cpuacct:/job\n"
    for folder in ("memory/job", "cpu/job"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert limit_of_groups(groups, tmp_path, "memory") is None
    assert limit_of_groups(groups, tmp_path, "cpu") is None
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("400000\n")
    assert limit_of_groups(groups, tmp_path, "memory") == GIB
    assert limit_of_groups(groups, tmp_path, "cpu") == 4


def problems(machine: dict[str, Any], **packages: str) -> dict[str, str | bool]:
    needed = {name: "" for names in FEATURES.values() for name in names}
    return judge(needed | check_machine(machine) | packages)


def has_backends(monkeypatch: pytest.MonkeyPatch, *backends: str) -> None:
    monkeypatch.setattr("zeroshard.cli.doctor.available_backends", lambda: backends)


@pytest.fixture
def good_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a compiler, and with devices that compute bfloat16."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    module = SimpleNamespace(is_bf16_supported=lambda including_emulation: True)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)


@pytest.mark.usefixtures("good_machine")
def test_without_an_accelerator_its_features_give_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    has_backends(monkeypatch, "gloo")
    found = problems(MACHINE)
    without = {name for name, problem in found.items() if problem is not True}
    gpu = {
        "ranks on GPUs",
        "several ranks with a GPU each",
        "bfloat16 on the GPU",
        "8-bit states on GPUs, fast",
    }
    assert without == gpu
    assert {found[name] for name in without} == {MACHINE["why_none"]}


@pytest.mark.usefixtures("good_machine")
def test_features_follow_from_devices_backends_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    has_backends(monkeypatch, "gloo", "nccl")
    one, two = (MACHINE | CUDA | {"devices": [GPU] * number} for number in (1, 2))
    assert {name: problem for name, problem in problems(one).items() if problem is not True} == {
        "several ranks with a GPU each": "this process sees one GPU"
    }
    assert set(problems(two).values()) == {True}
    module = SimpleNamespace(is_bf16_supported=lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert "emulation" in str(problems(two)["bfloat16 on the GPU"])
    has_backends(monkeypatch, "gloo")
    assert problems(two)["ranks on GPUs"] == "this torch has no NCCL"
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = problems(MACHINE, peft="peft is not installed", trl="too old", accelerate="older")
    assert (found["LoRA"], found["trainers of TRL"]) == ("peft is not installed", "too old; older")
    assert str(found["compile=true on CPUs"]).startswith("no C++ compiler")


def facts_with(torch_version: str, numba: str | None) -> dict[str, Any]:
    packages = {"numba": {"version": numba, "problem": "" if numba else "numba is not installed"}}
    return {"versions": {"torch": torch_version}, "packages": packages, "machine": MACHINE, "features": {}}


def test_versions_that_differ_between_ranks_are_named_with_the_ranks() -> None:
    facts, other = facts_with("2.14.1", "1"), facts_with("2.13.0", None)
    assert differences([facts, facts]) == []
    assert differences([facts, other, facts]) == [
        "torch: rank(s) 0, 2 have 2.14.1; rank(s) 1 have 2.13.0",
        "numba: rank(s) 0, 2 have 1; rank(s) 1 have not installed",
    ]


def test_the_machine_is_this_one() -> None:
    machine = read_machine()
    assert machine["memory"] == psutil.virtual_memory().total
    assert 0 < machine["memory_free"] <= machine["memory"]
    assert len(machine["devices"]) == torch.accelerator.device_count()
    assert bool(machine["why_none"]) != bool(machine["devices"])


def test_each_package_that_a_feature_needs_is_read() -> None:
    assert {"torch", "numpy", "mlflow", "numba"} <= read_facts()["packages"].keys()
    assert not {"GPU", "compiler"} & read_facts()["packages"].keys()


def test_one_rank_of_a_node_asks_devices_for_their_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 * GIB, major=9, minor=0)
    module = SimpleNamespace(
        get_device_properties=lambda index: properties, mem_get_info=lambda index: (70 * GIB, 80 * GIB)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert read_devices("cuda") == [GPU, GPU]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_devices("cuda") == [GPU | {"free": None}] * 2
    assert read_devices(None) == []


def test_devices_and_limits_are_shown() -> None:
    machine = MACHINE | CUDA | {"devices": [GPU, GPU], "memory_limit": GIB, "cpu_limit": 2.5}
    text = describe(
        facts_with("2.14.1", None) | {"machine": machine, "features": {"LoRA": True, "TRL": "no"}}
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    device = "name H100, free 70.00 GiB, total 80.00 GiB, compute capability 9.0"
    assert lines.index(device) == lines.index(f"devices {device}") + 1
    assert {"cores 8", "cpu limit 2.5", "memory limit 1.00 GiB", "swap 0 B"} <= set(lines)
    assert {"numba numba is not installed", "LoRA yes", "TRL no: no"} <= set(lines)
    assert "why none" not in text


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.cli.doctor.PART", 1 << 20)
    speed = measure_disk(tmp_path)
    assert speed["folder"] == str(tmp_path)
    assert min(speed["write"], speed["read"]) > 1e6
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(ValueError, match="expected an existing folder"):
        measure_disk(tmp_path / "missing")
    monkeypatch.setattr("zeroshard.cli.doctor.PART", 1 << 50)
    with pytest.raises(ValueError, match=r"--disk: expected \d+ MiB free in .*, got \d+"):
        measure_disk(tmp_path)
