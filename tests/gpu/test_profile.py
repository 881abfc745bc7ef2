"""Profiles on GPUs: times are those of streams, memory is that of the allocator."""

import time

import pytest
import torch

import zeroshard
from tests.gpu.training import STAGES, build, gpus, start, train

WIDTH, DEPTH, SIZE = 4096, 8, 512
"""Large enough that the device, and not the host, takes the time of each part."""


def profiled(stage):
    """A profile, the time around it, the peak that torch counted, and if losses are those without it."""
    engine = start(build(WIDTH, DEPTH), stage)
    train(engine, range(2), SIZE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = time.perf_counter()
    with zeroshard.profile(engine) as profile:
        losses = train(engine, range(2, 6), SIZE)
    torch.cuda.synchronize()
    around, peak = time.perf_counter() - before, torch.cuda.max_memory_allocated()
    plain = start(build(WIDTH, DEPTH), stage)
    return profile, around, peak, losses == train(plain, range(6), SIZE)[2:]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2)])
def test_the_parts_of_a_step_are_those_of_the_stream_of_compute(ranks, num_ranks, stage):
    found = ranks(num_ranks, profiled, stage, process_group=False, timeout=300)
    for profile, around, peak, is_same in found:
        assert is_same
        assert profile.num_steps == 4
        assert sum(profile.phases.values()) == pytest.approx(profile.seconds_per_step)
        assert profile.seconds <= around * 1.05
        assert profile.phases["forward"] > 0
        assert profile.phases["backward"] > profile.phases["forward"]
        assert profile.peak.total <= peak
        if stage == 3 and num_ranks > 1:
            assert profile.phases["gather"] > 0
            assert profile.phases["reduce"] > 0
