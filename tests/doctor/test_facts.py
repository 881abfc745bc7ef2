"""The facts of the doctor: versions, limits, and the features that follow from them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from zeroshard.cli.doctor import describe, measure_disk
from zeroshard.doctor.facts import (
    BEFORE,
    LEAST,
    Device,
    Facts,
    Installation,
    Machine,
    Package,
    cpu_limit,
    differences,
    judge,
    memory_limit,
    numbers,
    read_devices,
    read_machine,
    read_packages,
)

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
MACHINE = Machine(
    host="node-1",
    system="Linux 6 x86_64",
    cores=8,
    cpu_limit=None,
    memory=64 * GIB,
    memory_free=60 * GIB,
    memory_limit=None,
    swap=0,
    shared_memory=None,
    accelerator=None,
    why_none="torch 2.14.1+cpu is built for CPUs alone",
    devices=(),
)
INSTALLED = {name: Package("9", "") for name in LEAST}
GPU = Device("H100", 70 * GIB, 80 * GIB, "9.0")


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
            assert BEFORE.get(match[1]) == match[3]
    for name in ("pytest", "mkdocs-material", "torchdata"):  # no code of zeroshard imports them
        del asked[name]
    assert asked == {name: least for name, least in LEAST.items() if least}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.14.1+cu130", (2, 14, 1)), ("2.15.0rc1", (2, 15, 0)), ("5", (5,)), ("2.16.dev2", (2, 16))],
)
def test_versions_are_compared_by_their_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert numbers(text) == expected


def test_a_package_is_told_with_its_version_or_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "4.57.1", "torch": "2.16.0", "numba": "0.60", "peft": "0.21"}

    def version(name: str) -> str:
        from importlib.metadata import PackageNotFoundError

        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def broken(name: str) -> None:
        raise OSError(f"lib{name}.so: cannot open shared object file\nmore")

    monkeypatch.setattr("zeroshard.doctor.facts.version", version)
    monkeypatch.setattr("zeroshard.doctor.facts.import_module", broken)
    found = read_packages()
    assert found.keys() == LEAST.keys()
    assert found["peft"] == ("0.21", "")
    assert found["transformers"].problem == "expected transformers 5 or newer, got 4.57.1"
    assert found["torch"].problem == "expected torch before 2.16, got 2.16.0"
    assert found["numba"].problem == "numba 0.60 does not load: libnumba.so: cannot open shared object file"
    assert found["trl"] == (None, "trl is not installed: pip install trl")


def test_the_least_limit_of_all_groups_holds(tmp_path: Path) -> None:
    inner = tmp_path / "job" / "rank"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert memory_limit("0::/job/rank\n", tmp_path) is None
    assert cpu_limit("0::/job/rank\n", tmp_path) is None
    (tmp_path / "job" / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "job" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    assert memory_limit("0::/job/rank\n", tmp_path) == 8 * GIB
    assert cpu_limit("0::/job/rank\n", tmp_path) == 1.5


def test_limits_of_version_1_are_read_too(tmp_path: Path) -> None:
    groups = "4:memory:/job\n3:cpu,cpuacct:/job\n"
    for folder in ("memory/job", "cpu/job"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert memory_limit(groups, tmp_path) is None
    assert cpu_limit(groups, tmp_path) is None
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("400000\n")
    assert memory_limit(groups, tmp_path) == GIB
    assert cpu_limit(groups, tmp_path) == 4


def problems(**changes: object) -> dict[str, str]:
    found = Installation(INSTALLED, MACHINE, ("gloo",), ("g++",), None)._replace(**changes)
    return {feature.name: feature.problem for feature in judge(found)}


def test_without_an_accelerator_its_features_give_the_reason() -> None:
    found = problems()
    without = {name for name, problem in found.items() if problem}
    gpu = {
        "ranks on GPUs",
        "several ranks with a GPU each",
        "bfloat16 on the GPU",
        "8-bit states on GPUs, fast",
    }
    assert without == gpu
    assert {found[name] for name in without} == {MACHINE.why_none}


def test_features_follow_from_devices_backends_and_packages() -> None:
    machine = MACHINE._replace(accelerator="cuda", why_none="", devices=(GPU,))
    found = problems(machine=machine, backends=("gloo", "nccl"), has_bf16=True)
    assert {name: problem for name, problem in found.items() if problem} == {
        "several ranks with a GPU each": "this process sees one GPU"
    }
    two = machine._replace(devices=(GPU, GPU))
    assert not any(problems(machine=two, backends=("gloo", "nccl"), has_bf16=True).values())
    assert problems(machine=two)["ranks on GPUs"] == "this torch has no NCCL"
    assert "emulation" in problems(machine=two, backends=("nccl",), has_bf16=False)["bfloat16 on the GPU"]
    lacks = {**INSTALLED, "peft": Package(None, "peft is not installed"), "trl": Package("0.9", "too old")}
    found = problems(packages=lacks, compilers=())
    assert (found["LoRA"], found["trainers of TRL"]) == ("peft is not installed", "too old")
    assert found["compile=true on CPUs"].startswith("no C++ compiler")


def test_versions_that_differ_between_ranks_are_named_with_the_ranks() -> None:
    facts = Facts({"torch": "2.14.1"}, {"numba": Package("1", "")}, MACHINE, ())
    other = Facts({"torch": "2.13.0"}, {"numba": Package(None, "not installed")}, MACHINE, ())
    assert differences([facts, facts]) == []
    assert differences([facts, other, facts]) == [
        "torch: 2.14.1 on rank(s) 0, 2; 2.13.0 on rank(s) 1",
        "numba: 1 on rank(s) 0, 2; not installed on rank(s) 1",
    ]


def test_the_machine_is_this_one() -> None:
    machine = read_machine()
    assert machine.memory == psutil.virtual_memory().total
    assert 0 < machine.memory_free <= machine.memory
    assert len(machine.devices) == torch.accelerator.device_count()
    assert bool(machine.why_none) != bool(machine.devices)


def test_one_rank_of_a_node_asks_devices_for_their_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 * GIB, major=9, minor=0)
    module = SimpleNamespace(
        get_device_properties=lambda index: properties, mem_get_info=lambda index: (70 * GIB, 80 * GIB)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert read_devices("cuda") == (GPU, GPU)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_devices("cuda") == (GPU._replace(free=None),) * 2
    assert read_devices(None) == ()


def test_devices_and_limits_are_shown() -> None:
    machine = MACHINE._replace(
        accelerator="cuda", why_none="", devices=(GPU,), memory_limit=GIB, cpu_limit=2.5
    )
    text = describe(Facts({"torch": "2.14.1"}, {"numba": Package(None, "no")}, machine, ()))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "cuda:0 H100, 80.00 GiB, 70.00 GiB free, compute capability 9.0" in lines
    assert "cores 8, limited to the time of 2.5" in lines
    assert "limit of control groups 1.00 GiB" in lines
    assert "not installed numba" in lines


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.cli.doctor.PART", 1 << 20)
    speed = measure_disk(tmp_path)
    assert speed.folder == str(tmp_path)
    assert min(speed.write, speed.read) > 1e6
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(ValueError, match="expected an existing folder"):
        measure_disk(tmp_path / "missing")
    monkeypatch.setattr("zeroshard.cli.doctor.PART", 1 << 50)
    with pytest.raises(ValueError, match=r"--disk: expected \d+ MiB free in .*, got \d+"):
        measure_disk(tmp_path)
