"""What `engine.memory_report()` and `engine.comm_report()` tell."""

import mmap
import time
from dataclasses import fields

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

from tests.distributed.models import tiny
from tests.distributed.training import padded_size, square_loss, start
from tests.ranks import on_ranks
from zeroshard import CommReport, MemoryReport
from zeroshard.memory.report import measure_process


@on_ranks(2)
def test_reports_have_the_fields_of_the_design_and_count_since_the_last_reset():
    engine, optimizer = start(tiny(), "AdamW")
    fresh = engine.memory_report(), engine.comm_report()
    square_loss(engine, 0).backward()
    optimizer.step()
    used = engine.memory_report(), engine.comm_report()
    engine.reset_comm_report()
    reset = engine.comm_report()
    infos = [(unit.name, unit.numel, unit.kept) for unit in engine.units]
    total, num_parameters = padded_size(engine), len(list(engine.parameters()))
    kinds = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point", "control"}
    tiers = ["parameters", "gradients", "optimizer", "unsharded", "peak_unsharded", "host", "pinned", "nvme"]
    for memory, traffic in (fresh, used):
        assert type(memory) is MemoryReport
        assert [name for name in (field.name for field in fields(memory)) if name in tiers] == tiers
        assert type(traffic) is CommReport
        assert set(traffic.bytes_sent) == set(traffic.calls) == set(traffic.waited_s) == kinds
    assert set(reset.waited_s.values()) == {0.0}
    assert 0 < sum(used[1].waited_s.values()) < used[1].elapsed_s
    assert 0 <= reset.elapsed_s < used[1].elapsed_s
    assert set(fresh[1].calls.values()) == set(reset.calls.values()) == {0}
    assert set(reset.bytes_sent.values()) == {0}
    assert (fresh[0].gradients, fresh[0].optimizer, fresh[0].peak_unsharded) == (0, 0, 0)
    memory, traffic = used
    assert memory.parameters == fresh[0].parameters == 4 * total / 2
    assert 0 < memory.gradients <= 4 * total / 2
    assert 0 < memory.optimizer <= 8 * total / 2 + 4 * num_parameters
    assert (memory.unsharded, memory.host, memory.pinned, memory.nvme) == (0, 0, 0, 0)
    assert 0 < memory.peak_unsharded <= 4 * total
    assert traffic.bytes_sent["reduce_scatter"] == 4 * total / 2
    assert traffic.bytes_sent["all_gather"] >= 4 * total / 2
    assert traffic.calls["reduce_scatter"] == len(infos)
    assert (traffic.calls["all_reduce"], traffic.calls["point_to_point"]) == (0, 0)
    assert [name for name, _, _ in infos] == ["", "blocks.0", "blocks.1"]
    assert [kept for _, _, kept in infos] == [True, False, True]
    assert all(numel % (256 * 2) == 0 for _, numel, _ in infos)


@on_ranks(2)
def test_a_report_counts_what_states_wrap():
    """As the states of torchao's optimizers do."""
    engine, optimizer = start(tiny(), "SGD")
    square_loss(engine, 0).backward()
    optimizer.step()
    before, parameters = engine.memory_report().optimizer, list(engine.parameters())
    for p in parameters:
        optimizer.state[p]["both"] = TwoTensor(torch.zeros(p.shape), torch.zeros(p.shape))
    assert engine.memory_report().optimizer - before == 8 * sum(p.numel() for p in parameters)


@on_ranks(2)
def test_a_memory_report_has_the_memory_of_the_process_now_and_at_its_peak():
    engine, _ = start(tiny(), "SGD", stage=1)
    # A mapping of its own: the heap may serve an allocation from memory that it holds, and keep it there.
    with mmap.mmap(-1, 64 << 20) as ballast:
        ballast.write(bytes([1]) * len(ballast))
        with_ballast = engine.memory_report()
    after, rss = engine.memory_report(), psutil.Process().memory_info().rss
    assert "gathered" not in str(after), "the stage gathers nothing"
    assert with_ballast.rss - after.rss > 60 << 20
    assert after.peak_rss > with_ballast.rss - (1 << 20)  # Linux counts it but for some pages
    assert abs(after.rss - rss) < 16 << 20
    assert (after.allocated, after.reserved, after.peak_allocated) == (None, None, None)


def waits():
    """The seconds that each rank waits, by collective, when rank 1 comes late to a backward and to a sum."""
    engine, _ = start(tiny(), "SGD")
    loss = square_loss(engine, 0)
    engine.reset_comm_report()
    if dist.get_rank() == 1:
        time.sleep(0.4)
    loss.backward()
    in_backward = engine.comm_report().waited_s
    engine.reset_comm_report()
    if dist.get_rank() == 1:
        time.sleep(0.4)
    engine.clip_grad_norm_(1.0)
    return in_backward, engine.comm_report().waited_s


def test_the_time_for_which_a_rank_waits_for_a_slower_one_is_counted_by_collective(ranks):
    fast, slow = ranks(2, waits)
    for phase, kinds in ((0, ("all_gather", "reduce_scatter")), (1, ("control",))):
        waited = [sum(rank[phase][kind] for kind in kinds) for rank in (fast, slow)]
        assert 0.3 < waited[0] < 5
        assert waited[1] < waited[0] - 0.2
        assert sum(fast[phase].values()) == pytest.approx(waited[0], abs=0.1)


def test_on_an_accelerator_the_memory_is_that_of_its_allocator(monkeypatch):
    device = torch.device("cuda", 1)
    calls = ("memory_allocated", "memory_reserved", "max_memory_allocated")
    for number, name in enumerate(calls, 1):
        monkeypatch.setattr(torch.accelerator, name, lambda given, number=number: {device: number}[given])
    found = measure_process(device)
    assert (found.allocated, found.reserved, found.peak_allocated) == (1, 2, 3)
    assert (found.rss, found.peak_rss) == (None, None)
