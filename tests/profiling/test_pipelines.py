"""Profiles of pipelines: each action is a phase, also where units are not noted."""

import pytest
import torch

import zeroshard
from tests.parallel.pipeline.runs import parameters_of, start, train


def profiled(schedule, stage):
    config = {"mesh": {"pp": 2}, "stage": stage, "pipeline": {"schedule": schedule, "num_microbatches": 4}}
    engine = start("llama", config)
    with zeroshard.profile(engine) as profile:
        losses = train(engine, range(2))
    profile.operations = None  # torch's own stays on its rank
    plain = start("llama", config)
    want = train(plain, range(2))
    own, theirs = parameters_of(engine), parameters_of(plain)
    return profile, losses == want and all(torch.equal(own[name], theirs[name]) for name in own)


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(("num_ranks", "stage", "schedule"), [(2, 0, "1f1b"), (4, 3, "zb-h1")])
def test_actions_are_phases_and_add_up(ranks, num_ranks, stage, schedule):
    for rank, (profile, is_same) in enumerate(ranks(num_ranks, profiled, schedule, stage)):
        assert is_same
        assert profile.num_steps == 2
        chunk = rank // (num_ranks // 2)
        names = profile.units.keys()
        assert {f"action {chunk}F{number}" for number in range(4)} <= names
        assert any(f"action {chunk}{kind}3" in names for kind in "BI")
        assert profile.phases["wait"] > 0
