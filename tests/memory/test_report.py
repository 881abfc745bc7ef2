"""Memory: reports of an engine, and what does not fit is refused before anything is allocated."""

import mmap
import time
from dataclasses import fields
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

from tests.checkpoint import runs
from tests.distributed.models import tiny
from tests.distributed.training import caught, padded_size, square_loss, start
from tests.ranks import on_ranks
from tests.stores.tiers import swap_files
from zeroshard import CommReport, MemoryReport, estimate
from zeroshard.memory import budget
from zeroshard.memory.budget import check_budget, host_bytes_free, limits_of_groups
from zeroshard.memory.report import measure_process
from zeroshard.optim import AdamW8bit
from zeroshard.tables import format_bytes


@on_ranks(2)
def test_reports_have_the_fields_of_the_design_and_count_since_the_last_reset():
    kinds = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point", "control"}
    tiers = ["parameters", "gradients", "optimizer", "unsharded", "peak_unsharded", "host", "pinned", "nvme"]
    engine, optimizer = start(tiny(), "AdamW")
    total = padded_size(engine)
    fresh, silent = engine.memory_report(), engine.comm_report()
    square_loss(engine, 0).backward()
    optimizer.step()
    memory, traffic = engine.memory_report(), engine.comm_report()
    engine.reset_comm_report()
    reset = engine.comm_report()
    for report in (fresh, memory):
        assert type(report) is MemoryReport
        assert [field.name for field in fields(report) if field.name in tiers] == tiers
    for report in (silent, traffic, reset):
        assert type(report) is CommReport
        assert set(report.bytes_sent) == set(report.calls) == set(report.waited_s) == kinds
    assert 0 < sum(traffic.waited_s.values()) < traffic.elapsed_s
    assert 0 <= reset.elapsed_s < traffic.elapsed_s
    assert not any((*silent.calls.values(), *reset.calls.values(), *reset.bytes_sent.values()))
    assert not any(reset.waited_s.values())
    expected = estimate(tiny(), 2, engine.config)
    shown = {
        row[0]: row[1:] for row in map(str.split, str(engine.memory_report(expected)).splitlines()) if row
    }
    assert shown["kind"] == ["bytes", "expected"]
    assert shown["parameters"] == 2 * format_bytes(expected.parameters).split()
    assert shown["process"][-1] == "-"  # nobody can foretell it
    assert (fresh.gradients, fresh.optimizer, fresh.peak_unsharded) == (0, 0, 0)
    assert memory.parameters == fresh.parameters == 4 * total / 2
    assert 0 < memory.gradients <= 4 * total / 2
    assert 0 < memory.optimizer <= 8 * total / 2 + 4 * len(list(engine.parameters()))
    assert (memory.unsharded, memory.host, memory.pinned, memory.nvme) == (0, 0, 0, 0)
    assert 0 < memory.peak_unsharded <= 4 * total
    assert traffic.bytes_sent["reduce_scatter"] == 4 * total / 2
    assert traffic.bytes_sent["all_gather"] >= 4 * total / 2
    assert (traffic.calls["all_reduce"], traffic.calls["point_to_point"]) == (0, 0)
    assert traffic.calls["reduce_scatter"] == len(engine.units)
    kept = {unit.name: unit.kept for unit in engine.units}
    assert kept == {"": True, "blocks.0": False, "blocks.1": True}
    assert all(unit.numel % (256 * 2) == 0 for unit in engine.units)
    for p in engine.parameters():  # states that are tensors which wrap others, as those of torchao
        optimizer.state[p]["both"] = TwoTensor(torch.zeros(p.shape), torch.zeros(p.shape))
    wrapped = 8 * sum(p.numel() for p in engine.parameters())
    assert engine.memory_report().optimizer - memory.optimizer == wrapped


@on_ranks(2)
def test_a_memory_report_has_the_memory_of_the_process_now_and_at_its_peak():
    engine, _ = start(tiny(), "SGD", stage=1)
    # A mapping of its own: the heap may serve an allocation from memory that it holds, and keep it there.
    with mmap.mmap(-1, 256 << 20) as ballast:
        ballast.write(bytes([1]) * len(ballast))
        with_ballast = engine.memory_report()
    after, rss = engine.memory_report(), psutil.Process().memory_info().rss
    assert "gathered" not in str(after)
    assert with_ballast.rss - after.rss > 224 << 20  # the system may bring back pages of libraries meanwhile
    assert after.peak_rss > with_ballast.rss - (1 << 20)  # Linux counts it but for some pages
    assert abs(after.rss - rss) < 16 << 20
    assert (after.allocated, after.reserved, after.peak_allocated) == (None, None, None)


LATE_S = 0.5
"""Longer than a rank of a busy machine stands still."""


def waits():
    """The seconds that each rank waits, by collective, when rank 1 comes late to a backward and to a sum."""
    engine, _ = start(tiny(), "SGD")
    found = []
    for loss in (square_loss(engine, 0), None):
        engine.reset_comm_report()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        loss.backward() if loss is not None else engine.clip_grad_norm_(1.0)
        found.append(engine.comm_report().waited_s)
    return found


def test_the_time_for_which_a_rank_waits_for_a_slower_one_is_counted_by_collective(ranks):
    fast, slow = ranks(2, waits)
    for phase, kinds in ((0, ("all_gather", "reduce_scatter")), (1, ("control",))):
        waited = [sum(rank[phase][kind] for kind in kinds) for rank in (fast, slow)]
        assert LATE_S / 2 < waited[0] < 5
        assert waited[1] < waited[0] - 0.05
        assert sum(fast[phase].values()) == pytest.approx(waited[0], abs=LATE_S / 2)


def test_on_an_accelerator_the_memory_is_that_of_its_allocator(monkeypatch):
    device = torch.device("cuda", 1)
    calls = ("memory_allocated", "memory_reserved", "max_memory_allocated")
    for number, name in enumerate(calls, 1):
        monkeypatch.setattr(torch.accelerator, name, lambda given, number=number: {device: number}[given])
    found = measure_process(device)
    assert (found.allocated, found.reserved, found.peak_allocated) == (1, 2, 3)
    assert (found.rss, found.peak_rss) == (None, None)


# ------------------------------------------------------------------------------------------ what does not fit


GIB = 1 << 30
NEEDED = {"optimizer states": 8 * GIB, "main parameters": 2 * GIB}


def test_what_fits_to_the_byte_is_no_shortage_and_a_shortage_is_told_by_kind(monkeypatch):
    monkeypatch.setattr(budget, "host_bytes_free", lambda: 20 * GIB)
    check_budget(NEEDED, 2)
    check_budget({}, 2)
    monkeypatch.setattr(budget, "host_bytes_free", lambda: 20 * GIB - 1)
    *lines, remedy = caught(check_budget, NEEDED, 2).splitlines()
    assert lines == [
        "RuntimeError: Expected 20.00 GiB of host memory on this node, got 20.00 GiB free:",
        "  optimizer states: 8.00 GiB on each of 2 rank(s)",
        "  main parameters: 2.00 GiB on each of 2 rank(s)",
    ]
    assert 'offload.optimizer="nvme"' in remedy


def test_the_check_reads_this_node():
    check_budget({"optimizer states": 1}, 2)
    with pytest.raises(RuntimeError, match=r"Expected \d+.* of host memory.* got .* free"):
        check_budget({"optimizer states": 1 << 60}, 2)
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


def in_files(folder):
    return {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(folder)}}


@on_ranks(pytest.param(1, marks=pytest.mark.long), 2)
def test_what_is_needed_what_there_is_and_what_needs_less_are_told_on_all_ranks(tmp_path, num_ranks):
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda model: AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256),
    ):
        with mock.patch.object(budget, "host_bytes_free", return_value=1000):
            message = caught(runs.start, in_files(tmp_path), make)
        assert "of host memory on this node, got 1000 B free" in message
        assert "buffers for the units in files: " in message
        assert f"on each of {num_ranks} rank(s)" in message
        assert 'precision.main_dtype="bf16"' in message
    assert not swap_files(tmp_path)


@on_ranks(2)
def test_a_folder_that_one_rank_does_not_see_is_an_error_of_all(tmp_path):
    lost = ValueError("the folder is gone") if dist.get_rank() else None
    with mock.patch.object(budget, "check_folder", side_effect=lost):
        message = caught(runs.start, in_files(tmp_path), lambda model: torch.optim.AdamW(model.parameters()))
    assert message.startswith("ValueError: ")
    assert "the folder is gone (rank 1)" in message
