"""What does not fit is refused at the start, by kind, with what needs less."""

from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch

from tests.checkpoint import runs
from tests.ranks import on_ranks
from zeroshard.memory import budget
from zeroshard.memory.budget import check_budget, host_bytes_free, limits_of_groups
from zeroshard.optim import AdamW8bit

GIB = 1 << 30
NEEDED = {"optimizer states": 8 * GIB, "main parameters": 2 * GIB}


def check(monkeypatch, needed, nvme, free, disks):
    """Two ranks on a node with free bytes of host memory, and of each disk by its folder."""
    for folder in disks:
        folder.mkdir(exist_ok=True)
    monkeypatch.setattr(budget, "host_bytes_free", lambda: free)
    monkeypatch.setattr(budget.shutil, "disk_usage", lambda folder: SimpleNamespace(free=disks[folder]))
    check_budget(needed, nvme, list(disks), 2)


def test_what_fits_to_the_byte_is_no_shortage(tmp_path, monkeypatch):
    a, b = tmp_path / "a", tmp_path / "b"
    check(monkeypatch, NEEDED, 3 * GIB, 20 * GIB, {a: 3 * GIB, b: 3 * GIB})
    with pytest.raises(RuntimeError, match="Expected 20"):
        check(monkeypatch, NEEDED, 3 * GIB, 20 * GIB - 1, {a: 3 * GIB, b: 3 * GIB})
    with pytest.raises(RuntimeError, match=rf"on the disk of {b}"):
        check(monkeypatch, NEEDED, 3 * GIB, 20 * GIB, {a: 3 * GIB, b: 3 * GIB - 1})
    check(monkeypatch, {}, 0, 0, {})


def test_a_shortage_of_memory_is_told_by_kind_with_what_needs_less(monkeypatch):
    with pytest.raises(RuntimeError) as caught:
        check(monkeypatch, NEEDED, 0, 11 * GIB, {})
    *lines, remedy = str(caught.value).splitlines()
    assert lines == [
        "Expected 20.00 GiB of host memory on this node, got 11.00 GiB free:",
        "  optimizer states: 8.00 GiB on each of 2 rank(s)",
        "  main parameters: 2.00 GiB on each of 2 rank(s)",
    ]
    assert 'offload.optimizer="nvme"' in remedy


def test_the_check_reads_this_node(tmp_path):
    check_budget({"optimizer states": 1}, 4096, [tmp_path, str(tmp_path)], 2)
    with pytest.raises(RuntimeError, match=r"Expected \d+.* of host memory(.|\n)*/.* got .* free"):
        check_budget({"optimizer states": 1 << 60}, 1 << 60, [tmp_path], 2)
    with pytest.raises(RuntimeError, match=r"nvme_path: expected .* disk of /proc/self .* got 0 B free"):
        check_budget({}, nvme=1, folders=["/proc/self"], num_ranks_on_node=1)
    with pytest.raises(ValueError, match=r"nvme_path: expected an existing folder .* does not exist"):
        check_budget({}, 1, [tmp_path / "missing"], 1)
    assert 0 < host_bytes_free() <= psutil.virtual_memory().total


def test_limits_of_control_groups_of_version_2(tmp_path):
    contents = {
        "job": ("1000\n", "900\n", "anon 1\ninactive_file 50"),
        "job/rank": ("max\n", "7\n", "inactive_file 3\n"),
    }
    for folder, texts in contents.items():
        (tmp_path / folder).mkdir()
        for name, text in zip(("max", "current", "stat"), texts, strict=True):
            (tmp_path / folder / f"memory.{name}").write_text(text)
    assert list(limits_of_groups("0::/job/rank\n", tmp_path)) == [150]
    assert list(limits_of_groups("0::/elsewhere\n", tmp_path)) == []


def test_each_disk_has_the_share_of_its_folder(tmp_path, monkeypatch):
    disks = {tmp_path / "a": 4 * GIB, tmp_path / "b": 4 * GIB, tmp_path / "c": 3 * GIB}
    with pytest.raises(RuntimeError) as caught:
        check(monkeypatch, {}, 6 * GIB, 100 * GIB, disks)
    line, _ = str(caught.value).splitlines()
    assert line == (  # 4 GiB in each of 3 folders
        f"offload.nvme_path: expected 4.00 GiB on the disk of {tmp_path / 'c'} for 2 rank(s), "
        "got 3.00 GiB free"
    )


@on_ranks(pytest.param(1, marks=pytest.mark.long), 2)
def test_what_is_needed_what_there_is_and_what_needs_less_are_told_on_all_ranks(tmp_path, num_ranks):
    config = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda model: AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256),
    ):
        with (
            mock.patch.object(budget, "host_bytes_free", return_value=1000),
            mock.patch.object(budget.shutil, "disk_usage", return_value=SimpleNamespace(free=5000)),
            pytest.raises(RuntimeError, match="of host memory on this node, got 1000 B free") as caught,
        ):
            runs.start(config, make)
        message = str(caught.value)
        assert "buffers for the units in files: " in message
        assert f"on each of {num_ranks} rank(s)" in message
        assert f"on the disk of {tmp_path} for {num_ranks} rank(s), got 4.9 KiB free" in message
        assert 'precision.main_dtype="bf16"' in message
    assert not list(tmp_path.rglob("*.swap"))
