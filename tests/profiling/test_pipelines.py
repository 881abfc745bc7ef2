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
        assert sum(profile.phases.values()) == pytest.approx(profile.seconds_per_step)
        chunk = rank // (num_ranks // 2)
        names = {span.phase.name for span in profile.spans}
        assert {f"action {chunk}F{number}" for number in range(4)} <= names
        assert any(f"action {chunk}{kind}3" in names for kind in "BI")
        assert profile.phases["wait"] > 0


def counted(schedule):
    config = {"mesh": {"pp": 2}, "stage": 0, "pipeline": {"schedule": schedule, "num_microbatches": 4}}
    engine = start("llama", config)
    with zeroshard.profile(engine, flops=True) as profile:
        train(engine, range(2))
    return profile.flops, profile.model_flops


def test_forwards_that_a_schedule_runs_again_are_not_of_the_model(ranks):
    plain = ranks(2, counted, "1f1b")
    again = ranks(2, counted, "varuna")
    for (num_all, of_model), (num_plain, want) in zip(again, plain, strict=True):
        assert of_model == want <= num_plain <= num_all
    assert again[0][0] > plain[0][0]  # the last rank has its activations at hand
