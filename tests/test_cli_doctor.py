"""`zeroshard doctor`: versions, devices, and the features that follow from packages."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from tests.commands import shown
from zeroshard.cli import doctor

GIB = 1 << 30


def test_the_page_has_versions_the_machine_and_features(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "doctor")
    assert re.search(rf"torch +{re.escape(torch.__version__)}\n", out)
    assert re.search(r"backends of torch .*gloo", out)
    assert re.search(r"models of transformers +yes: transformers \S+, safetensors \S+\n", out)


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
