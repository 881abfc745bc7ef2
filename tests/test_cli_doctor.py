"""`zeroshard doctor`: versions, devices, and the features that follow from packages."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.commands import failure, shown
from zeroshard.cli import doctor
from zeroshard.planning import machine

GIB = 1 << 30


def test_the_page_has_versions_the_machine_and_features(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "doctor")
    assert re.search(rf"torch +{re.escape(torch.__version__)}\n", out)
    assert re.search(r"backends of torch .*gloo", out)
    assert re.search(r"models of transformers +yes: transformers \S+, safetensors \S+\n", out)


def test_the_rates_of_the_machine_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_BYTES", 1 << 24)
    monkeypatch.setattr(machine, "_WIDTHS", {"cpu": 64})
    found = json.loads(shown(capsys, "doctor", "--json", "--disk", tmp_path))
    assert (found["device"], found["num_devices"], found["to_host"]) == ("cpu", 1, None)
    assert found["flops"].keys() == {"float32", "bfloat16"}
    rates = [*found["flops"].values(), *(found[name] for name in ("bandwidth", "disk_write", "disk_read"))]
    assert all(1e5 < rate < 1e15 for rate in rates)
    assert 0 < found["host_bytes"] == found["device_bytes"]
    assert not list(tmp_path.iterdir())
    code, said = failure(capsys, "doctor", "--disk", tmp_path)
    assert (code, said) == (2, "zeroshard: --disk needs --json\n")


def test_packages_and_devices_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numba": "0.60", "peft": "0.21", "numpy": "2.3"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def broken(name: str) -> None:
        raise RuntimeError(f"lib{name}.so: cannot open shared object file\nmore")

    module = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(name="H100"),
        mem_get_info=lambda index: (70 * GIB, 80 * GIB),
    )
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "import_module", broken)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    lines = [" ".join(line.split()) for line in doctor.page().splitlines()]
    broken_lib = "libnumba.so: cannot open shared object file"
    device = "H100, 70.00 GiB free of 80.00 GiB"
    assert lines.index(f"cuda:1 {device}") == lines.index(f"cuda:0 {device}") + 1
    assert {
        "LoRA yes: peft 0.21",
        f"8-bit states on CPUs, fast no: numba 0.60 does not load: {broken_lib}",
        "Lightning no: lightning is not installed: pip install lightning",
    } <= set(lines)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: broken("cuda"))
    assert doctor.read_machine()["accelerator"] == "none: libcuda.so: cannot open shared object file"
