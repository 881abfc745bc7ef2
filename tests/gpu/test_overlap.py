"""Times of kernels: exchanges run beside compute, and a profile has the parts of a step."""

import pytest
import torch

import zeroshard
from tests.gpu.training import BF16, STAGES, build, gpus, start, train


def covered(intervals, others):
    """The part of the total length of `intervals` during which one of `others` is under way, 0 to 1."""
    merged = []
    for start_, stop in sorted(others):
        if merged and start_ <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start_, stop])
    total = sum(stop - start_ for start_, stop in intervals)
    common = sum(
        max(0.0, min(stop, other_stop) - max(start_, other_start))
        for start_, stop in intervals
        for other_start, other_stop in merged
    )
    return common / total if total else 0.0


def test_what_is_covered_is_counted_once():
    assert covered([(0, 10)], [(2, 4), (3, 6), (8, 20)]) == pytest.approx(0.6)
    assert covered([(0, 2), (4, 6)], [(0, 1), (5, 6)]) == pytest.approx(0.5)
    assert covered([(0, 2)], []) == 0
    assert covered([], [(0, 2)]) == 0


def share_beside_compute(stage):
    """Of three steps: the part of the time of NCCL's kernels during which others ran, and their number."""
    engine = start(build(4096, 8), stage, precision=BF16)
    train(engine, range(3))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train(engine, range(3))
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    exchanges, compute = [], []
    for event in kernels:
        is_exchange = "nccl" in event.name.lower()
        (exchanges if is_exchange else compute).append((event.time_range.start, event.time_range.end))
    return covered(exchanges, compute), len(exchanges)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=gpus(2, own=True))])
def test_a_good_part_of_the_exchanges_runs_beside_compute(on_gpus, num_ranks, stage):
    for share, num_exchanges in on_gpus(num_ranks, share_beside_compute, stage):
        assert num_exchanges > 0
        assert share > 0.3


WIDTH, DEPTH, SIZE = 4096, 8, 512
"""Large enough that the device, and not the host, takes the time of each part."""


def profiled(stage):
    """A profile, and if losses are those without it."""
    engine = start(build(WIDTH, DEPTH), stage)
    train(engine, range(2), SIZE)
    with zeroshard.profile(engine) as profile:
        losses = train(engine, range(2, 6), SIZE)
    profile.operations = None  # torch's own stays on its rank
    plain = start(build(WIDTH, DEPTH), stage)
    return profile, losses == train(plain, range(6), SIZE)[2:]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2)])
def test_the_parts_of_a_step_have_the_times_of_their_kernels(on_gpus, num_ranks, stage):
    found = on_gpus(num_ranks, profiled, stage)
    for profile, is_same in found:
        assert is_same
        assert profile.num_steps == 4
        assert profile.phases["forward"] > 0
        assert profile.phases["backward"] > profile.phases["forward"]
        if stage == 3 and num_ranks > 1:
            assert profile.phases["gather"] > 0
            assert profile.phases["reduce"] > 0
