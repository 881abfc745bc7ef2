"""Profiles on GPUs: times are those of the kernels that ranges have started."""

import pytest

import zeroshard
from tests.gpu.training import STAGES, build, gpus, start, train

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
