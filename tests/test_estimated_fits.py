"""Settings that fit a device, and the time that an estimate takes itself."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zeroshard
from zeroshard.cli.planning import DEVICES, SHARE, Room, find_fits, least, memory_of
from zeroshard.config.sections import Config
from zeroshard.memory.activations import Tokens
from zeroshard.memory.estimate import Counted

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


@pytest.mark.long
@given(st.integers(10**8, 10**11), st.integers(1, 200))
def test_more_memory_never_takes_a_setting_away(num_params, gib):
    few, many = (kinds(fits(num_params, size * GIB, host=1 << 40)) for size in (gib, 2 * gib))
    assert set(few) <= set(many)


def test_an_unknown_device_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"expected a device among .*, h100, .*, got 'h10'"):
        memory_of("h10")
    assert all(size >= 10**9 for size in DEVICES.values())


def test_a_trillion_parameters_on_4096_ranks_take_less_than_5_seconds():
    started = time.perf_counter()
    for stage in range(4):
        found = zeroshard.estimate(1e12, 4096, {"stage": stage}, num_tokens=Tokens(8192, 4096))
    assert found.parameters == pytest.approx(4e12 / 4096, rel=1e-3)
    assert time.perf_counter() - started < 5
