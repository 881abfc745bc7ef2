"""Settings that fit a device, and the time that an estimate takes itself."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zeroshard
from zeroshard.cli.planning import SHARE, Room, find_fits, least
from zeroshard.config.sections import Config
from zeroshard.memory.activations import Tokens
from zeroshard.memory.estimate import Counted

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
BF16 = Config.parse({"precision": "bf16"})


def fits(num_params: float, device: int, host: int = 0, nvme: int = 0, tokens: int = 8192):
    return find_fits(
        Counted(num_params, tokens), 8, BF16, Room(device=device, host=host, nvme=nvme, ranks_per_node=8)
    )


def kinds(found):
    return [
        (f.config.offload.optimizer, f.config.offload.parameters, f.config.recompute, f.config.stage, f.bits)
        for f in found
    ]


def test_with_room_for_everything_plain_data_parallelism_comes_first():
    first = fits(1e8, 80 * GIB)[0]
    assert kinds([first]) == [("none", "none", "none", 1, 32)]
    assert first.costs == ()


def test_settings_are_in_the_order_of_their_costs_and_fit():
    found = fits(13e9, 80 * GIB, host=1 << 40, nvme=1 << 42)
    assert len(found) > 8
    tiers = [(f.config.offload.optimizer, f.config.offload.parameters) for f in found]
    order = [("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")]
    assert tiers == sorted(tiers, key=order.index)
    assert set(tiers) == set(order)
    on_device = [f for f in found if f.config.offload.optimizer == "none"]
    assert [f.config.recompute for f in on_device] == sorted(f.config.recompute for f in on_device)
    assert all(f.estimate.peak <= SHARE * 80 * GIB for f in found)
    assert len({(f.estimate, f.costs) for f in found}) == len(found)


def test_a_setting_is_the_estimate_of_its_config():
    for fit in fits(13e9, 80 * GIB, host=1 << 40)[:4]:
        own = zeroshard.estimate(13e9, 8, fit.config, optimizer_bits=fit.bits, num_tokens=8192)
        assert fit.estimate == own


def test_values_lie_on_the_host_only_where_the_node_has_room():
    assert all(f.config.offload.optimizer == "none" for f in fits(13e9, 80 * GIB))
    # 8 bytes a parameter for two float32 states, 4 for main parameters, and bf16 gradients at least
    room = 14 * 13 * 10**9 // 2
    found = [f for f in fits(13e9, 80 * GIB, host=room) if f.estimate.host]
    assert all(8 * f.estimate.host <= room for f in found)
    assert all(f.bits == 8 or f.config.offload.device_fraction for f in found)


def test_as_much_as_fits_stays_on_the_device():
    """30B with 8-bit states and bf16 main parameters on one GPU of 60 GB, with 128 GB of host memory."""
    precision = {"param_dtype": "bf16", "main_dtype": "bf16"}
    base = Config.parse({"precision": precision, "offload": {"step_in_backward": True}})
    room = Room(device=60 * 10**9, host=115 * 10**9, ranks_per_node=1)
    first = find_fits(Counted(30e9, 0), 1, base, room)[0]
    offload = first.config.offload
    assert (offload.optimizer, offload.parameters, first.bits) == ("cpu", "cpu", 8)
    assert 0 < offload.device_fraction < 0.5, "parameters stay first"
    assert room.holds(first.estimate)
    more = replace(first.config, offload=replace(offload, device_fraction=offload.device_fraction + 0.1))
    assert not room.holds(zeroshard.estimate(30e9, 1, more, optimizer_bits=8))


def test_nothing_fits_into_too_little_and_the_least_setting_is_told():
    assert fits(70e9, 24 * GIB) == []
    nearest = least(Counted(70e9, 8192), 8, BF16, Room(device=24 * GIB))
    assert (nearest.config.stage, nearest.bits, nearest.config.recompute) == (3, 8, "unit")
    assert nearest.estimate.peak > 24 * GIB


def test_stages_that_a_config_rules_out_are_left_out():
    base = Config.parse({"precision": "bf16", "shard_group_size": 4})
    found = find_fits(Counted(1e9), 8, base, Room(device=80 * GIB))
    assert {f.config.stage for f in found} == {1, 3}  # stage 2 holds what stage 1 holds


@pytest.mark.long
@given(st.integers(10**8, 10**11), st.integers(1, 200))
def test_more_memory_never_takes_a_setting_away(num_params, gib):
    few, many = (kinds(fits(num_params, size * GIB, host=1 << 40)) for size in (gib, 2 * gib))
    assert set(few) <= set(many)


def test_a_trillion_parameters_on_4096_ranks_take_less_than_5_seconds():
    started = time.perf_counter()
    for stage in range(4):
        found = zeroshard.estimate(1e12, 4096, {"stage": stage}, num_tokens=Tokens(8192, 4096))
    assert found.parameters == pytest.approx(4e12 / 4096, rel=1e-3)
    assert time.perf_counter() - started < 5


def processor_time(*command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "stdout": subprocess.DEVNULL}
    subprocess.run([sys.executable, *command], check=True, **run)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.long
def test_the_command_takes_little_more_processor_time_than_to_import_torch():
    torch_alone = processor_time("-c", "import torch")  # about 1.9 s; the command then takes 2.0 s
    assert processor_time("-m", "zeroshard", "estimate", "1T", "--ranks", "4096") < 1.8 * torch_alone
